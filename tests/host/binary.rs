//! What the programs ask of the machine that they start on: they run inside engine images as well as in their own.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Stdio;

use object::Endianness;
use object::elf::FileHeader64;
use object::read::elf::{Dyn, FileHeader};
use tokio::process::Command;
use weightsync_net::identity::Ca;

use crate::world::{PROGRAM, until};

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

/// Where a text stands in a program: symbols and constants alike.
fn holds(program: &Path, text: &str) -> bool {
    memchr::memmem::find(&fs::read(program).unwrap(), text.as_bytes()).is_some()
}

#[test]
fn shipped_program_holds_no_simulator() {
    // The crate's name is in each of its symbols; the path is one that simulated engines alone serve.
    for sign in ["weightsync_testkit", "/simulator/digest", "DemoForCausalLM"] {
        assert!(holds(&weightsync_testkit::dev_program(), sign), "{sign} is no sign of a simulator any more");
        for program in [env!("CARGO_BIN_EXE_weightsync"), env!("CARGO_BIN_EXE_kubectl-weightsync")] {
            assert!(!holds(Path::new(program), sign), "{program} holds {sign}");
        }
    }
}

/// Found by the chaos harness: a disk that was full below the log ended whatever was logging in the middle, an install among it, and the
/// replica was reported as being fed until its update counted as stuck.
#[tokio::test]
async fn an_agent_whose_log_cannot_be_written_goes_on_without_it() {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let folder = tempfile::tempdir().unwrap();
    let port = weightsync_coordinator::local::free_port().unwrap();
    let full = || Stdio::from(fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
    let environment = [
        ("WEIGHTSYNC_ROLE", "rollout".to_owned()),
        ("POD_NAME", "a".to_owned()),
        ("POD_UID", format!("full-{port}")),
        ("POD_IP", "127.0.0.1".to_owned()),
        ("WEIGHTSYNC_CONTROLLER_URL", "127.0.0.1:9".to_owned()),
        ("WEIGHTSYNC_CONTROLLER_CA", Ca::generate().unwrap().certificate_pem().to_owned()),
        ("WEIGHTSYNC_TOKEN", "t".to_owned()),
        ("WEIGHTSYNC_STATUS_ADDRESS", format!("127.0.0.1:{port}")),
        ("WEIGHTSYNC_VERSION_DIR", folder.path().to_string_lossy().into_owned()),
        ("WEIGHTSYNC_GPUS", "none".to_owned()),
        ("WEIGHTSYNC_LOG", "debug".to_owned()),
    ];
    let mut command = Command::new(PROGRAM);
    command
        .args(["agent", "--probe-address", "127.0.0.1:0"])
        .envs(environment)
        .stdin(Stdio::null())
        .stdout(full())
        .stderr(full())
        .kill_on_drop(true);
    let mut agent = command.spawn().unwrap();
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    // It says so itself: it asked the controller, in vain, and logged that.
    let asked = || async {
        let page = http.get(format!("http://127.0.0.1:{port}/readyz")).send().await;
        page.is_ok_and(|page| page.status() == 503)
    };
    until("the agent to answer", asked).await;
    assert!(agent.try_wait().unwrap().is_none(), "it ended");
}
