//! The controller's loop on one host, from a file, with processes instead of pods.
