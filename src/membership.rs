//! When a group is formed, fenced and formed anew.
//!
//! Pure: observations and a clock value in, decisions out. Never waits, never sends: `coordinator` carries the decisions out.
