//! The documentation against the code that it speaks of.

use std::fs;
use std::path::Path;

use weightsync::protocol::Reason;

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
    let mut folders = vec![root.join("src"), root.join("tests")];
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
