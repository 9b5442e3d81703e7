use super::*;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

const LOOKS: Definition = Definition::counter("reconcile", "Looks").by(&[("outcome", "`success` or `error`")]);
const TIMES: Definition = Definition::times("looking", "Time of a look");

#[test]
fn a_registered_counter_appears_with_prefix_and_suffix() {
    let metrics = Metrics::default();
    let counter: Counter = metrics.register(&LOOKS, Counter::default());
    metrics.register(&TIMES, times()).observe(0.5);
    counter.inc();
    let text = metrics.text().unwrap();
    assert!(text.contains("weightsync_reconcile_total 1\n"), "{text}");
    assert!(text.contains("weightsync_looking_seconds_count 1\n"), "{text}");
    assert!(text.contains(concat!("weightsync_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1")), "{text}");
    assert_eq!(differences(&text, &[LOOKS, TIMES]), Vec::<String>::new());
}

#[test]
fn what_is_exposed_and_not_defined_is_found() {
    let metrics = Metrics::default();
    let counters: Family<Vec<(String, String)>, Counter> = metrics.register(&LOOKS, Family::default());
    counters.get_or_create(&vec![("pod".into(), "a=\",{b".into())]).inc();
    let found = differences(&metrics.text().unwrap(), &[LOOKS, TIMES]);
    assert!(found.contains(&"weightsync_reconcile_total has the label pod, which is not defined".to_owned()), "{found:?}");
    assert!(differences(&metrics.text().unwrap(), &[]).contains(&"weightsync_reconcile is not defined".to_owned()));
}

#[test]
fn the_table_names_the_series_that_queries_use() {
    let table = table(&[LOOKS, TIMES, BUILD]);
    assert!(table.contains("| `weightsync_reconcile_total` | counter | `outcome` (`success` or `error`) | Looks |"), "{table}");
    assert!(table.contains("| `weightsync_looking_seconds` | histogram |  | Time of a look |"), "{table}");
    assert!(table.contains("| `weightsync_build_info` | info |"), "{table}");
}
