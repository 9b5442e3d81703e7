//! Tests that change the cluster or its operator for all: no other test runs meanwhile. Tests run in the order of their names, so these
//! come first, one after the other, before those that share the cluster.

mod controller;
mod devices;
mod outages;
mod registered;
mod standing;
mod uninstall;
