//! Each way to break the code is noticed.
