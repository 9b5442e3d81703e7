use std::process::Command;

use rustix::process::{Rlimit, setrlimit};

use super::*;

#[test]
fn a_refusal_names_the_cuda_that_is_needed() {
    let text = refused(4096, true, Some(12), Some(13000), "/x/libnixl_capi.so");
    assert!(text.contains("built for CUDA 12") && text.contains("install nixl-cu13"), "{text}");
}

/// Set for the process that lowers its own limit.
const LIMITED: &str = "WEIGHTSYNC_TEST_LIMITED";

#[test]
fn a_refusal_names_the_limit_of_locked_memory() {
    if std::env::var_os(LIMITED).is_some() {
        setrlimit(Resource::Memlock, Rlimit { current: Some(4096), ..getrlimit(Resource::Memlock) }).unwrap();
        let text = refused(8192, false, Some(12), None, "/x/libnixl_capi.so");
        assert!(text.contains("may lock 4096 bytes of memory (RLIMIT_MEMLOCK)") && text.contains("ulimit -l"), "{text}");
    } else {
        // A limit is that of a whole process, which other tests share.
        let mut this = Command::new(std::env::current_exe().unwrap());
        this.args(["--exact", "nixl::agent::tests::a_refusal_names_the_limit_of_locked_memory"]).env(LIMITED, "1");
        let output = this.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }
}
