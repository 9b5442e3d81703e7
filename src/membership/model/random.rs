//! Random sequences of faults end well.
