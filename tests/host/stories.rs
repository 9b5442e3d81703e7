//! What users of other systems suffered, played against real processes. The number of a story is that of the project's list of failure
//! stories; each name says what must happen instead. Stories that plain functions can show are next to those functions (`grep 'fn f[0-9]'`).

mod canary;
mod cancelled;
mod causes;
mod fit;
mod gdr;
mod going_back;
mod left_out;
mod membership;
mod replies;
mod skew;
mod sleep;
mod snapshot;
mod unproven;
mod verbs;
mod versions;
