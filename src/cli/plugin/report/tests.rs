use super::*;

#[test]
fn file_with_a_long_name_is_cut_and_stays_apart() {
    let mut collected = Collected::default();
    assert_eq!(collected.text("pods", "a", ".json", String::new()), "pods/a.json");
    let name = "p".repeat(200);
    let cut = [0, 1].map(|_| collected.text("pods", &name, ".json", String::new()));
    assert!(cut.iter().all(|file| file.len() == LONGEST_NAME && file.contains(".json")), "{cut:?}");
    assert_ne!(cut[0], cut[1]);
}

#[test]
fn error_of_the_api_server_is_kept_as_its_code_only() {
    let status = kube::core::Status::failure("planted", "Forbidden").with_code(403).boxed();
    let error = anyhow::Error::new(kube::Error::Api(status)).context("pods cannot be listed");
    let mut collected = Collected::default();
    assert_eq!(collected.take::<()>("pods", Err(error)), None);
    assert_eq!(collected.missing[0].what, "pods: pods cannot be listed (status 403)");
    assert!(collected.missing[0].causes.contains("planted"));
}
