use super::*;

/// What a reader does.
fn let_go(folder: &Path, counter: &Counter) {
    let file = OpenOptions::new().read(true).write(true).open(folder.join(&counter.name[1..])).unwrap();
    let at = FIRST + 8 * counter.slot;
    let mut number = [0; 8];
    file.read_exact_at(&mut number, at).unwrap();
    file.write_all_at(&(i64::from_le_bytes(number) - 1).to_le_bytes(), at).unwrap();
}

#[test]
fn each_tensor_is_read_when_its_own_reader_let_it_go() {
    let folder = tempfile::tempdir().unwrap();
    let mut counters = Counters::create(folder.path()).unwrap();
    let (first, second) = (counters.take().unwrap(), counters.take().unwrap());
    let_go(folder.path(), &second);
    assert!(!counters.is_read(&first).unwrap() && counters.is_read(&second).unwrap());
    let_go(folder.path(), &first);
    assert!(counters.is_read(&first).unwrap());
    assert_eq!(std::fs::metadata(folder.path().join(&first.name[1..])).unwrap().len(), 80_064, "torch maps that much");
    drop(counters);
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none());
}

#[test]
fn reused_slot_counts_from_zero() {
    let folder = tempfile::tempdir().unwrap();
    let mut counters = Counters::create(folder.path()).unwrap();
    let first = counters.take().unwrap();
    let_go(folder.path(), &first);
    (1..SLOTS).for_each(|_| drop(counters.take().unwrap()));
    let again = counters.take().unwrap();
    assert_eq!(again, first);
    assert!(!counters.is_read(&again).unwrap());
}
