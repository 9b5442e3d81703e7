use super::*;

/// Judgements by member: `-` refused, `+` taken, `?` undecided.
fn refused(judged: &[(&str, &str)]) -> (bool, usize, usize) {
    let names: Vec<(MemberName, Judgement)> = judged
        .iter()
        .flat_map(|(pod, said)| said.chars().enumerate().map(move |(port, word)| (pod, port, word, said.len() > 1)))
        .map(|(pod, port, word, several)| {
            let name = if several { format!("actors/{pod}:{port}") } else { format!("actors/{pod}") };
            let judgement = match word {
                '-' => Judgement::Refused,
                '+' => Judgement::Taken,
                _ => Judgement::Undecided,
            };
            (MemberName(name), judgement)
        })
        .collect();
    let mut ballot = Ballot::default();
    for (name, judgement) in &names {
        ballot.add(name, *judgement);
    }
    (ballot.is_refused(), ballot.refused(), ballot.judged())
}

#[test]
fn most_pods_refuse_a_version_for_all() {
    assert_eq!(refused(&[("a", "-"), ("b", "-"), ("c", "+")]), (true, 2, 3));
    assert_eq!(refused(&[("a", "-"), ("b", "+")]), (false, 1, 2));
    assert_eq!(refused(&[("a", "-"), ("b", "-"), ("c", "+"), ("d", "?")]), (false, 2, 3));
    assert_eq!(refused(&[]), (false, 0, 0));
}

/// A pod registered six engines of its own, and each refused what two honest pods served.
#[test]
fn many_engines_of_one_pod_have_one_vote() {
    assert_eq!(refused(&[("a", "+"), ("b", "+"), ("liar", "------")]), (false, 1, 3));
    assert_eq!(refused(&[("a", "--------")]), (true, 1, 1));
    assert_eq!(refused(&[("a", "--++")]), (false, 0, 1));
    assert_eq!(refused(&[("a", "-"), ("b", "-?")]), (false, 1, 1));
}
