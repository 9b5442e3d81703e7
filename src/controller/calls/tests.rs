use kube::core::Status;
use serde_json::json;

use super::*;

fn refused(code: u16, reason: &str, message: &str, field: Option<&str>) -> ApiError {
    let causes: Vec<_> = field.iter().map(|field| json!({"field": field, "message": "field is immutable", "reason": "Invalid"})).collect();
    let status: Status = serde_json::from_value(json!({
        "status": "Failure", "code": code, "reason": reason, "message": message, "details": {"name": "fluid-uid", "causes": causes},
    }))
    .unwrap();
    ApiError::Kube { what: "patch pod fluid-uid".into(), source: Box::new(kube::Error::Api(Box::new(status))) }
}

#[test]
fn refusal_of_an_object_named_after_uids_is_no_absence() {
    let conflict = "Operation cannot be fulfilled on pods \"fluid-uid\": the object has been modified";
    assert!(!refused(409, "Conflict", conflict, None).is_gone());
    let invalid = "Pod \"metadata.uid\" is invalid: spec.ephemeralContainers: Forbidden: existing ephemeral containers may not be changed";
    assert!(!refused(422, "Invalid", invalid, Some("spec.ephemeralContainers")).is_gone());
}

#[test]
fn precondition_on_another_uid_is_an_absence() {
    let conflict = "Operation cannot be fulfilled on pods \"a\": Precondition failed: UID in precondition: 1, UID in object meta: 2";
    assert!(refused(409, "Conflict", conflict, None).is_gone());
    assert!(refused(422, "Invalid", "Pod \"a\" is invalid", Some("metadata.uid")).is_gone());
    assert!(refused(422, "Invalid", "Pod \"a\" is invalid: metadata.uid: Invalid value: \"1\": field is immutable", None).is_gone());
    assert!(refused(404, "NotFound", "pods \"a\" not found", None).is_gone());
}
