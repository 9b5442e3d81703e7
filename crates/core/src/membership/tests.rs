//! Tables: one situation each, with what must follow from it. Whole worlds are played by the model test (`tests/model`).

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
