//! The texts that `--filename` names: a file, standard input (`-`), or a folder with its files, as for `kubectl apply`.

use std::path::{Path, PathBuf};

use anyhow::Context;

/// Names of files that a folder is searched for, as for `kubectl`.
const EXTENSIONS: [&str; 3] = ["json", "yaml", "yml"];

/// The texts of all these paths, with the path of each. A folder gives its files in the order of their names, without those of folders in it.
pub(super) fn read(paths: &[PathBuf]) -> anyhow::Result<Vec<(PathBuf, String)>> {
    let mut texts = Vec::new();
    for path in paths {
        for file in files(path)? {
            let text = weightsync_agent::command::text::read(&file)?;
            texts.push((file, text));
        }
    }
    Ok(texts)
}

fn files(path: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let unreadable = || format!("the folder {} cannot be read", path.display());
    let entries = std::fs::read_dir(path).and_then(Iterator::collect::<Result<Vec<_>, _>>).with_context(unreadable)?;
    let wanted =
        |file: &PathBuf| file.extension().and_then(|extension| extension.to_str()).is_some_and(|extension| EXTENSIONS.contains(&extension));
    let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).filter(wanted).collect();
    files.sort();
    anyhow::ensure!(!files.is_empty(), "the folder {} has no file that ends with .json, .yaml or .yml", path.display());
    Ok(files)
}
