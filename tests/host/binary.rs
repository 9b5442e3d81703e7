//! What the programs ask of the machine that they start on: they run inside engine images as well as in their own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use object::Endianness;
use object::elf::FileHeader64;
use object::read::elf::{Dyn, FileHeader};

/// Ubuntu 22.04 has it, on which the images of inference engines are made.
const NEWEST_GLIBC: [u32; 2] = [2, 35];

/// Symbol versions that the loader must find, by library, and all libraries that it must find.
fn needs(program: &Path) -> (BTreeMap<String, BTreeSet<String>>, BTreeSet<String>) {
    let file = fs::read(program).unwrap();
    let data = file.as_slice();
    let header = FileHeader64::<Endianness>::parse(data).unwrap();
    let endian = header.endian().unwrap();
    let sections = header.sections(endian, data).unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();

    let mut versions: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    let (mut needed, strings) = sections.gnu_verneed(endian, data).unwrap().expect("symbols with versions");
    let strings = sections.strings(endian, data, strings).unwrap();
    while let Some((library, mut symbols)) = needed.next().unwrap() {
        let versions = versions.entry(text(library.file(endian, strings).unwrap())).or_default();
        while let Some(symbol) = symbols.next().unwrap() {
            versions.insert(text(symbol.name(endian, strings).unwrap()));
        }
    }

    let (dynamic, strings) = sections.dynamic(endian, data).unwrap().expect("a dynamically linked program");
    let strings = sections.strings(endian, data, strings).unwrap();
    let libraries = dynamic.iter().filter(|entry| entry.tag(endian) == object::elf::DT_NEEDED);
    let libraries = libraries.map(|entry| text(entry.string(endian, strings).unwrap())).collect();
    (versions, libraries)
}

/// `GLIBC_2.2.5` as numbers.
fn glibc(version: &str) -> Option<Vec<u32>> {
    version.strip_prefix("GLIBC_")?.split('.').map(|part| part.parse().ok()).collect()
}

#[test]
fn the_programs_start_on_the_glibc_of_engine_images() {
    for program in [env!("CARGO_BIN_EXE_weightsync"), env!("CARGO_BIN_EXE_kubectl-weightsync")] {
        let (versions, libraries) = needs(Path::new(program));
        let glibcs: Vec<_> = versions.values().flatten().filter_map(|version| glibc(version)).collect();
        assert!(glibcs.len() > 5, "{program} is not linked as it should be: {versions:?}");
        let newer: Vec<_> = glibcs.into_iter().filter(|version| version.as_slice() > NEWEST_GLIBC.as_slice()).collect();
        assert!(newer.is_empty(), "{program} needs symbols of glibc {newer:?}");
        // Those of glibc, and the unwinder, which every image with a C++ program in it has. GPU libraries are opened at run time.
        let strange: Vec<_> = libraries
            .iter()
            .filter(|library| !["libc.so.6", "libm.so.6", "libgcc_s.so.1"].contains(&library.as_str()) && !library.starts_with("ld-linux"))
            .collect();
        assert!(strange.is_empty(), "{program} needs {strange:?}");
    }
}
