//! The kubectl plugin: `kubectl weightsync status | inject | plan | release`.

fn main() {}
