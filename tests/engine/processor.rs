//! The processor that real servers of the tests compute for: `make engine-test CPU=avx2` sets `WEIGHTSYNC_TEST_CPU`.

/// Variables for the environment of every real server; none where no processor is chosen.
///
/// # Panics
///
/// With the name of a processor that is not known.
pub fn environment() -> &'static [(&'static str, &'static str)] {
    let chosen = std::env::var_os("WEIGHTSYNC_TEST_CPU").unwrap_or_default();
    let known = chosen.to_str().and_then(variables);
    known.unwrap_or_else(|| panic!("WEIGHTSYNC_TEST_CPU is {}: it must be avx2, or empty for this machine's own", chosen.display()))
}

/// Of one choice; none where it is not known.
pub fn variables(chosen: &str) -> Option<&'static [(&'static str, &'static str)]> {
    match chosen {
        "" => Some(&[]),
        // oneDNN and torch then use neither AVX-512 nor AMX. vLLM's own kernels go by the processor.
        "avx2" => Some(&[("ONEDNN_MAX_CPU_ISA", "AVX2"), ("ATEN_CPU_CAPABILITY", "avx2")]),
        _ => None,
    }
}
