//! Opens a library at run time and finds its functions: a missing library or function is an error that names it.
//!
//! A library is opened with all its symbols bound (`RTLD_NOW`) and to itself (`RTLD_LOCAL`), and never unloaded: driver, NCCL and
//! NIXL have threads of their own.

mod python;

use std::path::Path;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

pub(crate) use python::site_packages;

pub(super) struct Opened(Library);

/// Opens a library by path, or by the loader's own search when it is a bare name.
pub(super) fn open(path: &Path) -> Result<Opened, String> {
    // SAFETY: running the initialisers of libcuda, libnccl or libnixl_capi is what we are here for; the path was chosen by the operator or found in
    // the places where these libraries are installed.
    let library = unsafe { Library::open(Some(path.as_os_str()), RTLD_NOW | RTLD_LOCAL) };
    library.map(Opened).map_err(|error| {
        let source = std::error::Error::source(&error).map(ToString::to_string);
        source.unwrap_or_else(|| error.to_string())
    })
}

/// The file that the loader found for a bare name, as the kernel reports it; the path itself if it is one.
pub(super) fn loaded_from(path: &Path) -> String {
    if path.components().count() > 1 {
        return path.display().to_string();
    }
    let name = path.to_string_lossy();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let file = maps.lines().filter_map(|line| line.find('/').and_then(|at| line.get(at..))).find(|file| file.contains(name.as_ref()));
    file.map_or_else(|| name.clone().into_owned(), str::to_owned)
}

impl Opened {
    /// The function of that name; none when the library lacks it.
    ///
    /// # Safety
    /// `F` must be the type of the function.
    pub(super) unsafe fn function<F: Copy>(&self, name: &str) -> Option<F> {
        // SAFETY: the caller says that `F` is the function's type.
        unsafe { self.0.get::<F>(name) }.ok().map(|symbol| *symbol)
    }

    /// Keeps the library for the rest of the process's life.
    pub(super) fn keep(self) {
        std::mem::forget(self.0);
    }
}

/// A table of functions, loaded from one library. `needed` ones are all there; `optional` ones where the library has them.
macro_rules! functions {
    ($(#[$about:meta])* struct $table:ident {
        needed { $($name:ident = $symbol:literal fn($($argument:ty),*) -> $result:ty;)* }
        optional { $($maybe:ident = $maybe_symbol:literal fn($($maybe_argument:ty),*) -> $maybe_result:ty;)* }
    }) => {
        $(#[$about])*
        #[allow(clippy::type_complexity)]
        pub(super) struct $table {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
            $(pub(super) $maybe: Option<unsafe extern "C" fn($($maybe_argument),*) -> $maybe_result>,)*
        }

        impl $table {
            /// Finds all functions, or names the first that is missing.
            fn find(library: &$crate::library::Opened) -> Result<Self, String> {
                // SAFETY: the types below are those of the library's header.
                unsafe {
                    Ok(Self {
                        $($name: library.function($symbol).ok_or_else(|| format!("it lacks {}", $symbol))?,)*
                        $($maybe: library.function($maybe_symbol),)*
                    })
                }
            }

            /// Names of the optional functions that are missing.
            #[allow(unused_mut, dead_code)]
            fn lacks(&self) -> Vec<String> {
                let mut missing = Vec::new();
                $(if self.$maybe.is_none() { missing.push($maybe_symbol.to_owned()); })*
                missing
            }
        }
    };
}
pub(super) use functions;
