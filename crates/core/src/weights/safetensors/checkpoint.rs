//! A checkpoint on disk, one file or sharded, as a list of tensors whose bytes can be read at any place.
//!
//! Decides which files form a checkpoint, and the order of its tensors: files by name, tensors by their place in the file. So reading the
//! stream reads each file from front to back. It keeps the files open, so that a replaced directory does not mix two checkpoints. It never
//! maps them: a file that is truncated under a mapping kills the process.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::{INDEX_FILE, MAX_INDEX_BYTES, SINGLE_FILE, SafetensorsError, header_length, parse_header, parse_index};
use crate::weights::{Layout, Section, TensorSpec, shown};

/// A tensor of a checkpoint with its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckpointTensor {
    /// Name, type and shape; no load unit, because a checkpoint has none.
    pub spec: TensorSpec,
    /// Length in bytes.
    pub bytes: u64,
    /// Position of its file among the checkpoint's.
    file: usize,
    /// First byte in that file.
    offset: u64,
}

/// An open checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<OpenFile>,
    tensors: Vec<CheckpointTensor>,
    metadata: BTreeMap<String, String>,
}

#[derive(Debug)]
struct OpenFile {
    name: String,
    file: File,
    stamp: FileStamp,
}

/// Which file it is, and its state: changes whenever the file is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileStamp {
    bytes: u64,
    modified: (i64, i64),
    place: (u64, u64),
}

impl FileStamp {
    fn of(file: &File) -> io::Result<(Self, bool)> {
        let found = file.metadata()?;
        let modified = (found.mtime(), found.mtime_nsec());
        Ok((Self { bytes: found.len(), modified, place: (found.dev(), found.ino()) }, found.is_file()))
    }
}

impl Checkpoint {
    /// Opens a safetensors file, or a directory with `model.safetensors`, with an index and its shards, or with one safetensors file.
    pub fn open(path: &Path) -> Result<Self, SafetensorsError> {
        let shown_path = path.display().to_string();
        let found = std::fs::metadata(path).map_err(|source| SafetensorsError::io(&shown_path, source))?;
        if !found.is_dir() {
            let name = path.file_name().map_or_else(|| shown_path.clone(), |name| name.to_string_lossy().into_owned());
            return Self::read(vec![OpenFile::open(path, name)?]);
        }
        let index = path.join(INDEX_FILE);
        let (has_index, has_single) = (index.exists(), path.join(SINGLE_FILE).exists());
        if has_index {
            let places = read_index(&index)?;
            if has_single && !places.values().any(|file| file == SINGLE_FILE) {
                let what = format!("holds both {SINGLE_FILE} and {INDEX_FILE} that does not name it: remove the one that is not meant");
                return Err(SafetensorsError::file(&shown_path, what));
            }
            return Self::open_shards(path, &places);
        }
        let name = if has_single { SINGLE_FILE.to_owned() } else { only_file(path, &shown_path)? };
        Self::read(vec![OpenFile::open(&path.join(&name), shown(&name))?])
    }

    /// Opens what an engine loads that is started with this path (vLLM 0.32, `filter_duplicate_safetensors_files`; SGLang does the same): in a
    /// directory all safetensors files, or where there is an index those that it names, with all tensors in them, whatever the index says of
    /// single tensors. Of two with one name the one in the later file counts. Files in Mistral's own naming (`consolidated*`) count where
    /// there are no others.
    pub fn open_as_engines_do(path: &Path) -> Result<Self, SafetensorsError> {
        let shown_path = path.display().to_string();
        if !std::fs::metadata(path).map_err(|source| SafetensorsError::io(&shown_path, source))?.is_dir() {
            return Self::open(path);
        }
        let index = path.join(INDEX_FILE);
        let mut names = if index.exists() { read_index(&index)?.into_values().collect() } else { safetensors_files(path, &shown_path)? };
        names.sort();
        names.dedup();
        if names.is_empty() {
            return Err(no_file(&shown_path));
        }
        if names.iter().any(|name| !name.starts_with("consolidated")) {
            names.retain(|name| !name.starts_with("consolidated"));
        }
        let files = names.iter().map(|name| OpenFile::open(&path.join(name), shown(name)));
        let mut checkpoint = Self::read_headers(files.collect::<Result<_, _>>()?)?;
        let mut seen = BTreeSet::new();
        checkpoint.tensors.reverse();
        checkpoint.tensors.retain(|tensor| seen.insert(tensor.spec.name.clone()));
        checkpoint.tensors.reverse();
        Ok(checkpoint)
    }

    fn open_shards(directory: &Path, places: &BTreeMap<String, String>) -> Result<Self, SafetensorsError> {
        let mut names: Vec<&String> = places.values().collect();
        names.sort();
        names.dedup();
        let files = names.into_iter().map(|name| OpenFile::open(&directory.join(name), shown(name)));
        let checkpoint = Self::read(files.collect::<Result<_, _>>()?)?;
        let held: BTreeMap<&str, &str> = checkpoint.names().collect();
        for (tensor, file) in places {
            if held.get(tensor.as_str()) != Some(&shown(file).as_str()) {
                return Err(SafetensorsError::tensor(INDEX_FILE, tensor, format!("is not in {}, where the index says it is", shown(file))));
            }
        }
        if let Some((tensor, file)) = checkpoint.names().find(|(tensor, _)| !places.contains_key(*tensor)) {
            return Err(SafetensorsError::tensor(file, tensor, "is not in the index"));
        }
        Ok(checkpoint)
    }

    fn read(files: Vec<OpenFile>) -> Result<Self, SafetensorsError> {
        let checkpoint = Self::read_headers(files)?;
        let mut seen = BTreeMap::new();
        for (tensor, file) in checkpoint.names() {
            if let Some(other) = seen.insert(tensor, file) {
                return Err(SafetensorsError::tensor(file, tensor, format!("is also in {other}")));
            }
        }
        Ok(checkpoint)
    }

    fn read_headers(files: Vec<OpenFile>) -> Result<Self, SafetensorsError> {
        let mut checkpoint = Self { files, tensors: Vec::new(), metadata: BTreeMap::new() };
        for (position, open) in checkpoint.files.iter_mut().enumerate() {
            let io = |source| SafetensorsError::io(&open.name, source);
            let mut first = [0; 8];
            let length = if open.stamp.bytes < 8 { None } else { Some(open.file.read_exact(&mut first)).transpose().map_err(io)? };
            if length.is_none() {
                return Err(SafetensorsError::file(&open.name, "cut short: a safetensors file has at least 8 bytes"));
            }
            let length = header_length(&open.name, first, open.stamp.bytes)?;
            let mut json = Vec::new();
            (&open.file).take(length).read_to_end(&mut json).map_err(io)?;
            let start = length.saturating_add(8);
            let header = parse_header(&open.name, &json, open.stamp.bytes.saturating_sub(start))?;
            checkpoint.metadata.extend(header.metadata);
            checkpoint.tensors.extend(header.tensors.into_iter().map(|tensor| CheckpointTensor {
                bytes: tensor.end.saturating_sub(tensor.begin),
                file: position,
                offset: start.saturating_add(tensor.begin),
                spec: TensorSpec::new(tensor.name, tensor.dtype, tensor.shape),
            }));
        }
        Ok(checkpoint)
    }

    /// This checkpoint of a model, followed by the one of its draft model, whose tensors get the section [`Section::Draft`].
    #[must_use]
    pub fn with_draft(mut self, draft: Self) -> Self {
        let files = self.files.len();
        self.files.extend(draft.files);
        self.tensors.extend(draft.tensors.into_iter().map(|mut tensor| {
            tensor.file += files;
            tensor.spec.section = Section::Draft;
            tensor
        }));
        self
    }

    /// Tensors in their order: files by name, tensors by their place in the file.
    pub fn tensors(&self) -> &[CheckpointTensor] {
        &self.tensors
    }

    /// The specs of all tensors, in their order, for [`Layout::new`].
    pub fn specs(&self) -> Vec<TensorSpec> {
        self.tensors.iter().map(|tensor| tensor.spec.clone()).collect()
    }

    /// Free text from the writer; later files win.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Reads bytes of a tensor (by its position in [`Checkpoint::tensors`]) from `offset` on until `into` is full. Blocks.
    pub fn read_tensor(&self, index: usize, offset: u64, into: &mut [u8]) -> Result<(), SafetensorsError> {
        let Some((tensor, open)) = self.tensors.get(index).and_then(|tensor| Some((tensor, self.files.get(tensor.file)?))) else {
            return Err(SafetensorsError::file("checkpoint", format!("has no tensor number {index}")));
        };
        let wanted = into.len() as u64;
        if offset.checked_add(wanted).is_none_or(|end| end > tensor.bytes) {
            let what = format!("{wanted} bytes from {offset} on were asked for, it has {}", tensor.bytes);
            return Err(SafetensorsError::tensor(&open.name, &tensor.spec.name, what));
        }
        open.file.read_exact_at(into, tensor.offset.saturating_add(offset)).map_err(|source| SafetensorsError::TensorIo {
            file: open.name.clone(),
            tensor: shown(&tensor.spec.name),
            source,
        })
    }

    /// Fills `into` with the stream of `layout` from `offset` on, with zeros in gaps. `layout` must have been made from
    /// [`Checkpoint::specs`]. Blocks.
    pub fn read_stream(&self, layout: &Layout, offset: u64, into: &mut [u8]) -> Result<(), SafetensorsError> {
        let mut filled = 0;
        for part in layout.parts(offset, into.len() as u64) {
            let known = self.tensors.get(part.index).is_some_and(|tensor| tensor.spec.name == part.entry.tensor.name);
            let (start, length) = (usize::try_from(part.in_range).ok(), usize::try_from(part.bytes).ok());
            let place = start.zip(length).and_then(|(start, length)| Some(start..start.checked_add(length)?));
            let (true, Some(place)) = (known, place) else {
                return Err(SafetensorsError::tensor("checkpoint", &part.entry.tensor.name, "is not where the layout says"));
            };
            if let Some(gap) = into.get_mut(filled..place.start) {
                gap.fill(0);
            }
            filled = place.end;
            let Some(room) = into.get_mut(place) else {
                return Err(SafetensorsError::tensor("checkpoint", &part.entry.tensor.name, "does not fit the buffer"));
            };
            self.read_tensor(part.index, part.in_tensor, room)?;
        }
        if let Some(gap) = into.get_mut(filled..) {
            gap.fill(0);
        }
        Ok(())
    }

    /// The state of a tensor's file when it was opened.
    pub fn stamp_of(&self, index: usize) -> Option<FileStamp> {
        Some(self.files.get(self.tensors.get(index)?.file)?.stamp)
    }

    /// Checks that no file was written to since the checkpoint was opened; otherwise the bytes may be a mixture.
    pub fn check_unchanged(&self) -> Result<(), SafetensorsError> {
        for open in &self.files {
            let (now, _) = FileStamp::of(&open.file).map_err(|source| SafetensorsError::io(&open.name, source))?;
            if now != open.stamp {
                return Err(SafetensorsError::file(&open.name, "was written to while it was read: publish a finished checkpoint"));
            }
        }
        Ok(())
    }

    fn names(&self) -> impl Iterator<Item = (&str, &str)> {
        let named = |tensor: &CheckpointTensor| self.files.get(tensor.file).map_or("", |open| open.name.as_str());
        self.tensors.iter().map(move |tensor| (tensor.spec.name.as_str(), named(tensor)))
    }
}

impl OpenFile {
    fn open(path: &Path, name: String) -> Result<Self, SafetensorsError> {
        // Without O_NONBLOCK, opening a named pipe would wait without end.
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path);
        let io = |source| SafetensorsError::io(&name, source);
        let file = opened.map_err(io)?;
        let (stamp, is_file) = FileStamp::of(&file).map_err(io)?;
        if is_file { Ok(Self { name, file, stamp }) } else { Err(SafetensorsError::file(&name, "is not a regular file")) }
    }
}

fn read_index(path: &Path) -> Result<BTreeMap<String, String>, SafetensorsError> {
    let open = OpenFile::open(path, INDEX_FILE.to_owned())?;
    if open.stamp.bytes > MAX_INDEX_BYTES {
        return Err(SafetensorsError::file(INDEX_FILE, format!("{} bytes are too long for an index", open.stamp.bytes)));
    }
    let mut json = Vec::new();
    open.file.take(MAX_INDEX_BYTES).read_to_end(&mut json).map_err(|source| SafetensorsError::io(INDEX_FILE, source))?;
    parse_index(INDEX_FILE, &json)
}

/// Names of the safetensors files of a directory.
fn safetensors_files(directory: &Path, shown_path: &str) -> Result<Vec<String>, SafetensorsError> {
    let io = |source| SafetensorsError::io(shown_path, source);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if name.strip_suffix(".safetensors").is_some_and(|stem| !name.starts_with('.') && !stem.is_empty()) {
            names.push(name);
        }
    }
    Ok(names)
}

/// The only safetensors file of a directory that has neither of the usual names.
fn only_file(directory: &Path, shown_path: &str) -> Result<String, SafetensorsError> {
    let mut names = safetensors_files(directory, shown_path)?;
    match (names.pop(), names.is_empty()) {
        (Some(name), true) => Ok(name),
        (None, _) => Err(no_file(shown_path)),
        (Some(_), false) => Err(SafetensorsError::file(shown_path, format!("holds several safetensors files and no {INDEX_FILE}"))),
    }
}

fn no_file(shown_path: &str) -> SafetensorsError {
    SafetensorsError::file(shown_path, "holds no safetensors file (pickle is never read)")
}
