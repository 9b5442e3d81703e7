use super::{field, processor_seconds};

#[test]
fn a_name_with_blanks_and_parentheses_moves_no_field() {
    let line = "1 (a ) b) S 1 1 1 0 -1 4194560 9 0 0 0 150 50 0 0 20 0 7 0 100 9999 3 18446744073709551615";
    assert_eq!(processor_seconds(line), Some(2.0));
    assert_eq!(processor_seconds("nonsense"), None);
}

#[test]
fn numbers_of_the_status_are_found_by_name() {
    let status = "Name:\tVmRSS\nVmRSS:\t    1234 kB\nThreads:\t7\n";
    assert_eq!((field(status, "VmRSS"), field(status, "Threads"), field(status, "Missing")), (Some(1234), Some(7), None));
}
