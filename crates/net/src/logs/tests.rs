use super::check;

#[test]
fn only_our_own_code_may_be_traced_while_it_runs() {
    for fine in ["info", "debug", "weightsync=trace,info", "weightsync_agent=trace,warn", "hyper=debug,info", "off", "3", "weightsync"] {
        assert!(check(fine).is_ok(), "{fine}");
    }
    for refused in ["trace", "5", "hyper=trace,info", "hyper", "info,weightsync_not=trace", "rustls=TRACE", "weightsync[span]=info"] {
        assert!(check(refused).is_err(), "{refused}");
    }
}
