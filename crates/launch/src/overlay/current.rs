//! Files that a guest's disks have now: snapshots of a running guest replace those of its command line.

use std::fs;
use std::path::Path;

use super::{Disk, Overlay, absolute};
use crate::command_line::CommandLine;

/// Overlays of one disk that one directory can have.
const OVERLAYS_MAX: u32 = 10_000;

/// Files of a drive of a QEMU that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriveFiles {
    /// Format of the first file.
    pub format: String,
    /// The file that is written, its backing file, and so on: absolute paths, or relative to QEMU's directory.
    pub chain: Vec<String>,
}

impl DriveFiles {
    /// The file that is written, by a name that is valid in any directory.
    pub fn written_file(&self, working_directory: &Path) -> Option<String> {
        self.chain.first().map(|file| absolute(file, working_directory))
    }
}

impl CommandLine {
    /// Names the files that the drives have now in place of those that they were started with, if those are backing files now.
    pub fn use_current_files(&mut self, drives: &[DriveFiles], working_directory: &Path) {
        for (index, setting) in self.setting_keys().iter().enumerate() {
            // A disk without a format has no snapshot that could be named.
            let Ok(Some(disk)) = Disk::of(self, index, setting) else { continue };
            let started_with = absolute(&disk.file, working_directory);
            let is_it = |file: &String| absolute(file, working_directory) == started_with;
            let depth = |drive: &DriveFiles| drive.chain.iter().position(is_it);
            let nearest = drives
                .iter()
                .filter_map(|drive| Some((depth(drive)?, drive)))
                .min_by_key(|(depth, _)| *depth);
            if let Some((1.., drive)) = nearest {
                let file = drive.written_file(working_directory).unwrap_or(started_with);
                disk.redirect(self, index, &file, &drive.format);
            }
        }
    }

    /// The disks that a guest with this command line writes to, each as an overlay that has no name yet ([`Overlay::of_present_guest`]): in
    /// `directory`, or beside the disk. Left out is what no overlay is possible of.
    pub fn written_disks(&self, working_directory: &Path, directory: Option<&Path>) -> Vec<Overlay> {
        let overlay = |(index, setting): (usize, String)| {
            let disk = Disk::of(self, index, &setting).ok()??;
            let base = absolute(&disk.file, working_directory);
            let path = directory.map_or_else(|| base.clone().into(), |directory| directory.join("disk"));
            Some(Overlay { setting, base, format: disk.format, path })
        };
        self.setting_keys().into_iter().enumerate().filter_map(overlay).collect()
    }
}

impl Overlay {
    /// Further overlays of the same disks, in the same directories, for the guest that has the disks now: `STEM.N.qcow2` with the first
    /// number that is free. Left out is one that has none up to 10,000.
    pub fn of_present_guest(overlays: &[Self]) -> Vec<Self> {
        let mut further: Vec<Self> = Vec::new();
        for overlay in overlays {
            let next = overlay.next(|path| further.iter().any(|other| other.path == path));
            further.extend(next);
        }
        further
    }

    fn next(&self, is_taken: impl Fn(&Path) -> bool) -> Option<Self> {
        let stem = Path::new(&self.base).file_stem()?.to_str()?;
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let stem = stem.rsplit_once('.').filter(|(_, end)| is_number(end)).map_or(stem, |(stem, _)| stem);
        let mut paths = (1..=OVERLAYS_MAX).map(|n| self.path.with_file_name(format!("{stem}.{n}.qcow2")));
        let path = paths.find(|path| fs::symlink_metadata(path).is_err() && !is_taken(path))?;
        Some(Self { path, ..self.clone() })
    }
}
