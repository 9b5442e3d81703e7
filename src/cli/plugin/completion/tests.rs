use super::*;

fn of(words: &[&str]) -> Vec<String> {
    candidates(&Plugin::command(), &words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>())
}

#[test]
fn verbs_options_and_values_are_completed() {
    assert_eq!(of(&["re"]), ["release", "report"]);
    assert_eq!(of(&["ro"]), ["rollback"]);
    assert!(of(&[""]).contains(&"status".to_owned()) && !of(&[""]).contains(&"__complete".to_owned()));
    assert!(of(&["status", "--o"]).contains(&"--output".to_owned()));
    assert_eq!(of(&["status", "run", "--output", ""]), ["human", "json"]);
    assert_eq!(of(&["status", "-o", "j"]), ["json"]);
    assert!(of(&[]).is_empty() && of(&["status", "x"]).is_empty());
}
