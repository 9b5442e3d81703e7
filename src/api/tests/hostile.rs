//! Objects of any content, made from the schema of the CRD: what it admits is read, and anything else is read or refused with a message.
//!
//! A stored object may be older than a rule, and a file was seen by no API server: nothing that the types hold makes a conversion panic.

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, RngSeed, TestRng, TestRunner};
use serde_json::{Map, Value, json};

use crate::api::{WeightSync, WeightSyncSpec, prune, schema, unknown_fields, validate};

/// Objects that are made each time; `PROPTEST_CASES` asks for so many others.
const CASES: u32 = 600;
/// Text that numbers, shares, log-probs and names are not.
const ODD: [&str; 12] = [
    "",
    "0",
    "-1",
    "50%",
    "101%",
    "18446744073709551615%",
    "99999999999999999999",
    "-4.5",
    "nan",
    "a/b",
    "\u{0}é\u{202e}",
    "2026-01-01T00:00:00Z",
];
const NUMBERS: [i64; 8] = [i64::MIN, -2_147_483_649, -1, 0, 1, 65_536, 2_147_483_648, i64::MAX];

struct Maker {
    random: TestRng,
    /// Of so many values one is something else than the schema says; never for 0.
    spoil: u32,
}

impl Maker {
    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.random.next_u64() % limit.max(1) as u64).unwrap()
    }

    fn chance(&mut self, of: u32) -> bool {
        of > 0 && self.below(of as usize) == 0
    }

    fn odd(&mut self) -> String {
        ODD[self.below(ODD.len())].to_owned()
    }

    /// Any JSON at all.
    fn anything(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 5 } else { 7 }) {
            0 => Value::Null,
            1 => json!(self.chance(2)),
            2 => json!(NUMBERS[self.below(NUMBERS.len())]),
            3 => json!(0.5),
            4 => json!(self.odd()),
            5 => (0..self.below(3)).map(|_| self.anything(depth - 1)).collect(),
            _ => {
                let count = self.below(3);
                Value::Object((0..count).map(|_| (self.odd(), self.anything(depth - 1))).collect())
            }
        }
    }

    /// A value that a schema admits, but for what is spoiled.
    fn value(&mut self, schema: &Value) -> Value {
        if self.chance(self.spoil) {
            return self.anything(2);
        }
        let limit = |key: &str, otherwise: i64| schema.get(key).and_then(Value::as_i64).unwrap_or(otherwise);
        if let Some(choices) = schema.get("enum").and_then(Value::as_array) {
            return choices[self.below(choices.len())].clone();
        }
        if schema.get("x-kubernetes-int-or-string").is_some() {
            return if self.chance(2) { json!(self.below(9)) } else { json!(self.odd()) };
        }
        match schema.get("type").and_then(Value::as_str) {
            Some("boolean") => json!(self.chance(2)),
            Some("integer") => {
                let widest = if schema.get("format") == Some(&json!("int32")) { i64::from(i32::MAX) } else { i64::MAX };
                let (least, most) = (limit("minimum", -widest), limit("maximum", widest));
                let between = least.saturating_add(i64::try_from(self.below(9)).unwrap()).min(most);
                json!([least, between, most][self.below(3)])
            }
            Some("string") if schema.get("format") == Some(&json!("date-time")) => json!("2026-01-01T00:00:00Z"),
            Some("string") if schema.get("pattern").is_some() => json!("a1"),
            Some("string") => {
                let (least, most) = (limit("minLength", 0), limit("maxLength", 64));
                let text = self.odd();
                let length = i64::try_from(text.chars().count()).unwrap();
                json!(if (least..=most).contains(&length) { text } else { "a".repeat(usize::try_from(least).unwrap()) })
            }
            Some("array") => {
                let (least, most) = (limit("minItems", 0), limit("maxItems", 3));
                let count = (least + i64::try_from(self.below(3)).unwrap()).min(most);
                (0..count).map(|_| self.value(&schema["items"])).collect()
            }
            _ => self.object(schema),
        }
    }

    fn object(&mut self, schema: &Value) -> Value {
        let mut made = Map::new();
        let required = |name: &str| schema["required"].as_array().is_some_and(|names| names.iter().any(|one| one == name));
        for (name, field) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
            if required(name) && !self.chance(self.spoil) || !required(name) && self.chance(2) {
                made.insert(name.clone(), self.value(field));
            }
        }
        if let Some(values) = schema.get("additionalProperties").filter(|values| values.is_object()) {
            for _ in 0..self.below(3) {
                made.insert(self.odd(), self.value(values));
            }
        }
        if self.chance(self.spoil) {
            made.insert(self.odd(), self.anything(2));
        }
        Value::Object(made)
    }

    fn whole(&mut self, schema: &Value) -> Value {
        let mut object = self.value(schema);
        if let Some(fields) = object.as_object_mut() {
            fields.insert("apiVersion".to_owned(), json!("weightsync.dev/v1alpha1"));
            fields.insert("kind".to_owned(), json!("WeightSync"));
            fields.insert("metadata".to_owned(), json!({"name": "grpo"}));
        }
        object
    }
}

/// Everything that is made of a spec; whatever it holds, nothing panics, and no number is wrapped.
fn convert(object: &WeightSync) {
    let spec: &WeightSyncSpec = &object.spec;
    let _ = (object.plan_ref(), spec.plan_pools(), spec.trainer.to_plan(), spec.target());
    for pool in &spec.rollouts {
        let _ = WeightSyncSpec::engines(pool, &[]);
    }
    for total in [0, 1, 1_000, u32::MAX] {
        let policy = spec.update_policy(total);
        assert!(policy.min_ready >= 1);
        if let IntOrString::String(share) = &spec.membership.min_ready
            && share == "18446744073709551615%"
            && total > 0
        {
            assert_eq!(policy.min_ready, u32::MAX, "a share of {total} is cut at the limit");
        }
    }
}

/// Makes objects, and calls `check` with each as it is and as an API server keeps it.
fn each(spoil: u32, check: impl Fn(&Value, &Value) -> Result<(), TestCaseError>) {
    let schema = schema().unwrap();
    let usual = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    let config = if std::env::var_os("PROPTEST_CASES").is_some() {
        usual
    } else {
        ProptestConfig { cases: CASES, rng_seed: RngSeed::Fixed(1), ..usual }
    };
    let made = TestRunner::new(config).run(&any::<[u8; 32]>(), |seed| {
        let mut maker = Maker { random: TestRng::from_seed(RngAlgorithm::ChaCha, &seed), spoil };
        let object = maker.whole(&schema);
        let kept = prune(&schema, &object);
        prop_assert_eq!(unknown_fields(&schema, &kept), Vec::<String>::new(), "{}", object);
        prop_assert_eq!(&prune(&schema, &kept), &kept, "{}", object);
        check(&object, &kept)
    });
    made.unwrap();
}

#[test]
fn whatever_the_schema_admits_is_read_and_written_again() {
    let valid = std::cell::Cell::new(0_u32);
    each(0, |object, kept| {
        prop_assert_eq!(object, kept);
        let read: WeightSync = serde_json::from_value(kept.clone()).map_err(|error| TestCaseError::fail(format!("{error}: {kept}")))?;
        convert(&read);
        valid.set(valid.get() + u32::from(validate(&read.spec).is_empty()));
        let again: WeightSync = serde_json::from_value(serde_json::to_value(&read).unwrap()).unwrap();
        prop_assert_eq!(again, read);
        Ok(())
    });
    println!("{} objects passed all rules as well", valid.get());
}

#[test]
fn an_object_of_any_content_is_read_or_refused_with_a_message() {
    let (read, refused) = (std::cell::Cell::new(0_u32), std::cell::Cell::new(0_u32));
    each(40, |object, kept| {
        match serde_json::from_value::<WeightSync>(kept.clone()) {
            Err(error) => {
                prop_assert!(!error.to_string().is_empty());
                refused.set(refused.get() + 1);
            }
            Ok(of_kept) => {
                read.set(read.get() + 1);
                convert(&of_kept);
                for problem in validate(&of_kept.spec) {
                    prop_assert!(problem.field.starts_with("spec") && !problem.message.is_empty(), "{:?} of {}", problem, object);
                }
            }
        }
        // A file has fields that no one dropped.
        if let Ok(object) = serde_json::from_value::<WeightSync>(object.clone()) {
            convert(&object);
        }
        Ok(())
    });
    // Neither way is played by accident.
    assert!(read.get() > CASES / 20 && refused.get() > CASES / 20, "{} were read, {} refused", read.get(), refused.get());
}
