//! The `weightsync` program: `controller | agent | run | local | demo | publish | plan | generate`.

fn main() {}
