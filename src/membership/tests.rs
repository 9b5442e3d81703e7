//! Tables: one situation each, with what must follow from it. Whole worlds are played by `model`.

mod desk;
mod forming;
