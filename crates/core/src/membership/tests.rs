//! Tables: each has one situation, and the expected result. The model test (`tests/model`) plays whole worlds.

mod blame;
mod canary;
mod delivery;
mod desk;
mod ending;
mod feeding;
mod forming;
mod going_back;
mod hindrance;
mod joining;
mod leaving;
mod lying;
mod preflight;
mod restart;
mod skew;
mod transport;
mod updates;
mod waves;
