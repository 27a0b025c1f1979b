//! Text that must not change unnoticed: files below `tests/snapshots`, rewritten with `UPDATE=1`.

use std::fs;
use std::path::{Path, PathBuf};

/// Directory of a set of snapshots, and the texts that differ so far.
pub(crate) struct Snapshots {
    directory: PathBuf,
    seen: Vec<String>,
    differences: Vec<String>,
}

impl Snapshots {
    /// Opens a set.
    pub(crate) fn open(set: &str) -> Self {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(set);
        Self { directory, seen: Vec::new(), differences: Vec::new() }
    }

    /// Compares a text with the file of this name.
    pub(crate) fn compare(&mut self, name: &str, text: &str) {
        self.seen.push(name.to_owned());
        let path = self.directory.join(name);
        if std::env::var_os("UPDATE").is_some() {
            fs::create_dir_all(&self.directory).unwrap();
            fs::write(&path, text).unwrap();
            return;
        }
        let expected = fs::read_to_string(&path).unwrap_or_default();
        if expected != text {
            let line = expected.lines().zip(text.lines()).position(|(expected, found)| expected != found);
            let line = line.unwrap_or_else(|| expected.lines().count().min(text.lines().count()));
            let [expected, found] =
                [&expected[..], text].map(|text| text.lines().nth(line).unwrap_or("(end)"));
            self.differences.push(format!(
                "{}:{}: expected {expected:?}, found {found:?}",
                path.display(),
                line + 1
            ));
        }
    }

    /// Fails if a text differs, or a file has no text.
    pub(crate) fn finish(self) {
        let files = fs::read_dir(&self.directory).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let stale: Vec<String> = names.filter(|name| !self.seen.contains(name)).collect();
        assert!(
            self.differences.is_empty() && stale.is_empty(),
            "snapshots differ; if that is intended, run the test with UPDATE=1 and remove stale files\n{}\nstale: {stale:?}",
            self.differences.join("\n")
        );
    }
}
