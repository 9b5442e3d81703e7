use proptest::prelude::*;

use super::super::table::{ClientId, Refusal, Table};
use super::super::wire::{MAGIC, NOT_READY, READY, Request, STOP_WAITING, WAIT_CANCELED, write_bytes};
use super::super::{HELLO, MAX_BYTES, MAX_ENTRIES, MAX_VALUE};

fn table(clients: ClientId) -> Table {
    let mut table = Table::default();
    for client in 1..=clients {
        assert_eq!(ask(&mut table, client, &Request::Validate(MAGIC)), (vec![], vec![]));
    }
    table
}

/// Reply, and who is woken.
fn ask(table: &mut Table, client: ClientId, request: &Request<'_>) -> (Vec<u8>, Vec<ClientId>) {
    let mut reply = Vec::new();
    let woken = table.apply(client, request, &mut reply).unwrap();
    (reply, woken)
}

fn refused(table: &mut Table, client: ClientId, request: &Request<'_>) -> Refusal {
    table.apply(client, request, &mut Vec::new()).unwrap_err()
}

fn blob(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    write_bytes(bytes, &mut out);
    out
}

fn number(number: i64) -> Vec<u8> {
    number.to_le_bytes().to_vec()
}

#[test]
fn every_request_is_answered_as_torch_answers_it() {
    let mut table = table(1);
    let steps: [(Request<'_>, Vec<u8>); 27] = [
        (Request::Ping(7), vec![7, 0, 0, 0]),
        (Request::Set(b"a", b"1"), vec![]),
        (Request::Get(b"a"), blob(b"1")),
        (Request::Get(b"none"), blob(b"")),
        (Request::Add(b"a", 41), number(42)),
        (Request::Get(b"a"), blob(b"42")),
        (Request::Add(b"new", -3), number(-3)),
        (Request::Check(vec![b"a", b"new"]), vec![READY]),
        (Request::Check(vec![b"a", b"none"]), vec![NOT_READY]),
        (Request::Check(vec![]), vec![READY]),
        (Request::Wait(vec![b"a"]), vec![STOP_WAITING]),
        // Where there is no value: an empty expectation sets it, another is answered with itself.
        (Request::CompareSet(b"c", b"x", b"y"), blob(b"x")),
        (Request::CompareSet(b"c", b"", b"y"), blob(b"y")),
        (Request::CompareSet(b"c", b"z", b"w"), blob(b"y")),
        (Request::CompareSet(b"c", b"y", b"w"), blob(b"w")),
        (Request::Append(b"c", b"!"), vec![]),
        (Request::MultiSet(vec![(b"m", b"1"), (b"n", b"2")]), vec![]),
        (Request::MultiGet(vec![b"c", b"m", b"none", b"n"]), [blob(b"w!"), blob(b"1"), blob(b""), blob(b"2")].concat()),
        (Request::CountKeys, number(5)),
        (Request::Delete(b"m"), number(1)),
        (Request::Delete(b"m"), number(0)),
        (Request::QueuePush(b"q", b"first"), vec![]),
        (Request::Wait(vec![b"q"]), vec![STOP_WAITING]),
        (Request::QueueLength(b"q"), number(1)),
        (Request::QueuePop(b"q"), [number(1), blob(b"first")].concat()),
        (Request::QueuePop(b"q"), number(0)),
        (Request::CancelWait, vec![WAIT_CANCELED]),
    ];
    for (request, reply) in steps {
        assert_eq!(ask(&mut table, 1, &request), (reply, vec![]), "{request:?}");
    }
    let (listed, _) = ask(&mut table, 1, &Request::ListKeys);
    assert_eq!(listed.first_chunk(), Some(&4_u64.to_le_bytes()));
}

#[test]
fn a_wait_ends_when_the_last_of_its_keys_comes() {
    let mut table = table(3);
    assert_eq!(ask(&mut table, 1, &Request::Wait(vec![b"a", b"b"])), (vec![], vec![]));
    assert_eq!(ask(&mut table, 2, &Request::Wait(vec![b"b"])), (vec![], vec![]));
    assert_eq!(ask(&mut table, 3, &Request::Set(b"a", b"")).1, Vec::<ClientId>::new());
    assert_eq!(ask(&mut table, 3, &Request::Add(b"b", 1)).1, [1, 2]);
    assert_eq!(ask(&mut table, 3, &Request::Set(b"b", b"")).1, Vec::<ClientId>::new(), "no one waits any more");
}

#[test]
fn withdrawn_wait_or_gone_client_is_not_answered() {
    let mut table = table(3);
    ask(&mut table, 1, &Request::Wait(vec![b"a"]));
    ask(&mut table, 2, &Request::Wait(vec![b"a"]));
    ask(&mut table, 1, &Request::CancelWait);
    table.leave(2);
    assert_eq!(ask(&mut table, 3, &Request::Set(b"a", b"")).1, Vec::<ClientId>::new());
}

#[test]
fn a_value_in_a_queue_wakes_one_and_a_barrier_wakes_all() {
    let mut table = table(3);
    ask(&mut table, 1, &Request::Wait(vec![b"q"]));
    ask(&mut table, 2, &Request::Wait(vec![b"q"]));
    assert_eq!(ask(&mut table, 3, &Request::QueuePush(b"q", b"")).1, [1]);
    ask(&mut table, 2, &Request::CancelWait);
    assert_eq!(ask(&mut table, 1, &Request::Barrier(b"all", 3)), (vec![], vec![]));
    assert_eq!(ask(&mut table, 2, &Request::Barrier(b"all", 3)), (vec![], vec![]));
    assert_eq!(ask(&mut table, 3, &Request::Barrier(b"all", 3)), (vec![STOP_WAITING], vec![1, 2]));
}

#[test]
fn who_does_not_greet_as_torch_does_is_sent_away() {
    let mut table = table(1);
    assert_eq!(refused(&mut table, 2, &Request::Ping(1)), Refusal::NoGreeting);
    assert_eq!(refused(&mut table, 2, &Request::Validate(MAGIC + 1)), Refusal::NoGreeting);
    assert_eq!(refused(&mut table, 1, &Request::Validate(MAGIC)), Refusal::SecondGreeting);
}

#[test]
fn only_ranks_that_are_still_connected_count_and_each_once() {
    let mut table = table(3);
    for client in [1, 2, 2] {
        ask(&mut table, client, &Request::Add(HELLO.as_bytes(), 1));
    }
    ask(&mut table, 3, &Request::Add(b"/init/", 1));
    assert_eq!(table.hellos(), 2);
    table.leave(2);
    assert_eq!(table.hellos(), 1);
}

#[test]
fn store_owner_sees_who_asks_for_its_keys() {
    let mut table = table(3);
    ask(&mut table, 1, &Request::Wait(vec![b"id"]));
    assert_eq!(table.set_own(b"id", b"secret").unwrap(), [1]);
    assert_eq!(table.readers(b"id"), 1);
    ask(&mut table, 1, &Request::Get(b"id"));
    ask(&mut table, 2, &Request::MultiGet(vec![b"other", b"id"]));
    assert_eq!((table.readers(b"id"), table.readers(b"other")), (2, 0));
}

#[test]
fn a_full_store_refuses_what_is_new_and_keeps_what_is_old() {
    let mut table = table(1);
    let value = vec![7; MAX_VALUE];
    let names: Vec<String> = (0..MAX_BYTES / MAX_VALUE).map(|number| format!("{number}")).collect();
    let stored = names.iter().take_while(|name| table.apply(1, &Request::Set(name.as_bytes(), &value), &mut Vec::new()).is_ok()).count();
    assert!(stored > 50 && stored < names.len());
    assert_eq!(refused(&mut table, 1, &Request::Append(b"0", &value)), Refusal::Full);
    assert_eq!(ask(&mut table, 1, &Request::Get(b"0")).0.len(), 8 + MAX_VALUE);
    // What is given back can be used again.
    ask(&mut table, 1, &Request::Delete(b"1"));
    ask(&mut table, 1, &Request::Append(b"0", &value[..1000]));
    assert_eq!(refused(&mut table, 1, &Request::MultiGet(vec![b"0"; 4096])), Refusal::Full);
}

#[test]
fn waiting_for_very_many_keys_is_refused_too() {
    let mut table = table(1 + (MAX_ENTRIES / 4096) as ClientId);
    let names: Vec<Vec<u8>> = (0..4096_u32).map(|number| number.to_le_bytes().to_vec()).collect();
    let keys: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
    let last = 1 + (MAX_ENTRIES / 4096) as ClientId;
    for client in 1..last {
        ask(&mut table, client, &Request::Wait(keys.clone()));
    }
    assert_eq!(refused(&mut table, last, &Request::Wait(keys.clone())), Refusal::Full);
    table.leave(1);
    ask(&mut table, last, &Request::Wait(keys));
}

#[test]
fn a_number_is_not_made_of_something_else() {
    let mut table = table(1);
    ask(&mut table, 1, &Request::Set(b"text", b"x1"));
    assert_eq!(refused(&mut table, 1, &Request::Add(b"text", 1)), Refusal::NoNumber);
    ask(&mut table, 1, &Request::Set(b"most", i64::MAX.to_string().as_bytes()));
    assert_eq!(refused(&mut table, 1, &Request::Add(b"most", 1)), Refusal::NoNumber);
}

/// What a random client does to few keys.
fn step() -> impl Strategy<Value = (ClientId, u8, u8)> {
    (1..4_u64, 0..9_u8, 0..3_u8)
}

proptest! {
    /// Everyone who waits is woken by the last key and by nothing else, whatever happens in between: against a slow, plain model.
    #[test]
    fn waits_end_as_in_a_plain_model(steps in proptest::collection::vec(step(), 1..60)) {
        const KEYS: [&[u8]; 3] = [b"a", b"b", b"c"];
        let mut table = table(3);
        let mut there = [false; 3];
        let mut waits: [Vec<usize>; 4] = Default::default();
        for (client, what, key) in steps {
            let key = usize::from(key);
            let slot = usize::try_from(client).unwrap();
            match what {
                0..=2 => {
                    let (_, mut woken) = ask(&mut table, client, &Request::Set(KEYS[key], b"v"));
                    there[key] = true;
                    let mut expected = Vec::new();
                    for (waiter, missing) in waits.iter_mut().enumerate() {
                        let waited = !missing.is_empty();
                        missing.retain(|missed| *missed != key);
                        if waited && missing.is_empty() {
                            expected.push(waiter as ClientId);
                        }
                    }
                    woken.sort_unstable();
                    prop_assert_eq!(woken, expected);
                }
                3..=5 => {
                    let wanted: Vec<usize> = (0..=key).collect();
                    let (reply, _) = ask(&mut table, client, &Request::Wait(wanted.iter().map(|key| KEYS[*key]).collect()));
                    waits[slot] = wanted.into_iter().filter(|key| !there[*key]).collect();
                    // A second wait in the place of a first one is what only a broken client does; the first is forgotten.
                    prop_assert_eq!(reply.is_empty(), !waits[slot].is_empty());
                }
                6 => {
                    ask(&mut table, client, &Request::CancelWait);
                    waits[slot].clear();
                }
                7 => {
                    table.leave(client);
                    waits[slot].clear();
                    ask(&mut table, client, &Request::Validate(MAGIC));
                }
                _ => {
                    let (reply, _) = ask(&mut table, client, &Request::Delete(KEYS[key]));
                    prop_assert_eq!(reply, number(i64::from(there[key])));
                    there[key] = false;
                }
            }
        }
    }
}
