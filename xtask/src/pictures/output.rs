//! Writing a picture.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

pub(super) fn write(path: &Path, content: &str) -> Result<()> {
    fs::write(path, content).with_context(|| path.display().to_string())
}
