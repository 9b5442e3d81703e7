//! The documentation against the code that it speaks of.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use weightsync_core::protocol::Reason;

fn read(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

#[test]
fn troubleshooting_has_every_reason_and_no_other() {
    let text = read("docs/troubleshooting.md");
    let missing: Vec<_> = Reason::ALL.iter().filter(|reason| !text.contains(&format!("`{reason}`"))).collect();
    assert!(missing.is_empty(), "docs/troubleshooting.md lacks {missing:?}");
    let rows = text.lines().filter(|line| line.starts_with("| `"));
    for row in rows {
        let words = row.split('|').nth(1).unwrap().split(',').map(|word| word.trim().trim_matches('`'));
        for word in words {
            assert!(Reason::ALL.iter().any(|reason| reason.as_str() == word), "{word} is no reason");
        }
    }
}

#[test]
fn links_between_documents_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = vec![root.join("README.md")];
    let mut folders = vec![root.join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                files.push(path);
            }
        }
    }
    let mut broken = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = link.split('#').next().unwrap();
            if !target.is_empty() && !target.contains("://") && !file.parent().unwrap().join(target).exists() {
                broken.push(format!("{}: {link}", file.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn every_test_that_the_table_of_traps_names_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut code = String::new();
    let mut folders = vec![root.join("src"), root.join("crates"), root.join("tests")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                code += &fs::read_to_string(path).unwrap();
            }
        }
    }
    let text = read("docs/engines/traps.md");
    let rows: Vec<_> =
        text.lines().filter(|line| line.starts_with("| ") && line.split('|').nth(1).unwrap().trim().parse::<u32>().is_ok()).collect();
    assert!(rows.len() >= 27, "{} rows", rows.len());
    let tests = rows.iter().flat_map(|row| row.split('|').nth(4).unwrap().split('`').skip(1).step_by(2));
    let missing: Vec<_> = tests.filter(|test| !code.contains(&format!("fn {test}("))).collect();
    assert!(missing.is_empty(), "no such tests: {missing:?}");
}

/// Tests whose docs name stories (`/// Story F04.`) or a trap: the numbers, and the name of the test.
fn labelled(folder: &Path, word: &str, found: &mut Vec<(Vec<String>, String)>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            labelled(&path, word, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            for after in text.split(&format!("\n    /// {word}")).chain(text.split(&format!("\n/// {word}")).skip(1)).skip(1) {
                let (label, rest) = after.split_once('\n').unwrap();
                let numbers = label.split(|c: char| !c.is_ascii_alphanumeric()).filter(|part| part.ends_with(|c: char| c.is_ascii_digit()));
                let name = rest.split("fn ").nth(1).unwrap().split('(').next().unwrap();
                found.push((numbers.map(str::to_owned).collect(), name.to_owned()));
            }
        }
    }
}

#[test]
fn tests_that_name_a_story_or_trap_stand_in_its_row() {
    for (word, table) in [("Stor", "docs/failure-modes.md"), ("Trap ", "docs/engines/traps.md")] {
        let (text, mut found) = (read(table), Vec::new());
        for folder in ["src", "crates", "tests"] {
            labelled(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), word, &mut found);
        }
        assert!(found.len() >= 5, "{word}: {}", found.len());
        for (numbers, test) in found {
            for number in numbers {
                let row = text.lines().find(|line| line.starts_with(&format!("| {number} |")));
                assert!(row.is_some_and(|row| row.contains(&format!("`{test}`"))), "{table} lacks {test} in row {number}");
            }
        }
    }
}

/// Names of all functions of the sources and tests.
fn functions(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            functions(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            let name = |rest: &str| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap().to_owned();
            found.extend(text.split("fn ").skip(1).map(name));
        }
    }
}

#[test]
fn tests_that_documents_name_are_there() {
    let mut found = BTreeSet::new();
    for folder in ["src", "crates", "tests"] {
        functions(&Path::new(env!("CARGO_MANIFEST_DIR")).join(folder), &mut found);
    }
    let mut missing = Vec::new();
    let mut named = 0;
    for file in ["docs/security.md", "docs/failure-modes.md"] {
        // Sentences, as tests are called; words of fewer parts are fields and commands.
        let text = read(file);
        let words = text.split('`').skip(1).step_by(2);
        let tests = words.filter(|word| word.split('_').count() > 4 && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_'));
        for test in tests.filter(|word| !word.starts_with("weightsync_")) {
            named += 1;
            if !found.contains(test) {
                missing.push(format!("{file}: {test}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(named > 100, "{named}");
}

#[test]
fn every_story_has_one_row_that_says_what_holds_it() {
    let text = read("docs/failure-modes.md");
    for story in 1..=94 {
        let rows: Vec<&str> = text.lines().filter(|line| line.starts_with(&format!("| F{story:02} |"))).collect();
        let [row] = rows.as_slice() else { panic!("F{story:02} has {} rows", rows.len()) };
        let held = row.split('|').nth(3).unwrap().trim();
        let says = ["`", "not applicable", "needs hardware", "not built"].iter().any(|way| held.starts_with(way));
        assert!(says, "{row}");
    }
}
