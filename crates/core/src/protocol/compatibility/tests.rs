use super::*;

#[test]
fn builds_without_a_common_protocol_say_which_must_change() {
    let of = |oldest, newest| Protocols { oldest, newest };
    let table = [
        (of(1, 1), of(1, 1), None),
        (of(1, 2), of(2, 3), None),
        (of(3, 4), of(2, 3), None),
        (of(1, 1), of(2, 3), Some("its agent (0.1) speaks protocol 1, this controller")),
        (of(1, 1), of(2, 3), Some("speaks 2 to 3: recreate the pod")),
        (of(4, 5), of(2, 3), Some("speaks protocol 4 to 5")),
        (of(4, 5), of(2, 3), Some("upgrade the controller first")),
    ];
    for (agent, ours, expected) in table {
        let said = agent.lacks(ours, "0.1");
        assert_eq!(said.is_some(), expected.is_some(), "{agent} {ours}");
        assert!(said.unwrap_or_default().contains(expected.unwrap_or_default()), "{agent} {ours}");
    }
}
