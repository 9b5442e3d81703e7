//! The kubectl plugin. Verbs live in [`weightsync::cli::plugin`], one file each.

use std::process::ExitCode;

fn main() -> ExitCode {
    weightsync::cli::plugin::main()
}
