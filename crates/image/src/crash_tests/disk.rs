//! Model of a disk after a crash, which keeps no more than it must.
//!
//! - Changes of a file before its last `fsync` are kept. Each later change may be kept or lost,
//!   independently, and of a write only the first half may be kept.
//! - Changes of names before the directory's last `fsync` are kept. Each later change may be kept or lost,
//!   independently; a rename or exchange is atomic.
//!
//! This is weaker than any filesystem: most keep the order of renames, and write a file's data before its new
//! name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::journal::{FileNumber, Op};

/// Maximum number of unsynced changes of names; all subsets are tried.
const NAME_STEPS_MAX: usize = 10;
/// Maximum number of unsynced changes of files of which all subsets are tried.
const CONTENT_STEPS_MAX: usize = 4;

/// Files of the disk before the first step, all of them synced.
#[derive(Debug, Clone, Default)]
pub(super) struct Disk {
    files: BTreeMap<String, Vec<u8>>,
}

/// A state after a crash: the changes that were kept.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct State {
    /// File of each name: an earlier one, or one that was opened.
    names: BTreeMap<String, DiskFile>,
    /// Steps of each of these files that were kept; the second of a pair is true for a half-written one.
    contents: BTreeMap<DiskFile, Vec<(usize, bool)>>,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum DiskFile {
    Existing(String),
    Opened(FileNumber),
}

impl Disk {
    /// Reads the files of a directory.
    pub(super) fn of(directory: &Path) -> Self {
        let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
        let file = |entry: std::fs::DirEntry| {
            (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap())
        };
        Self { files: entries.map(file).collect() }
    }

    /// Every state that a crash after the first `done` steps may leave, or a random selection if there are
    /// too many.
    pub(super) fn states(&self, ops: &[Op], done: usize, random: &mut fastrand::Rng) -> BTreeSet<State> {
        let ops = &ops[..done];
        let synced = ops.iter().rposition(|op| *op == Op::SyncDirectory).map_or(0, |at| at + 1);
        let (kept, open): (Vec<usize>, Vec<usize>) =
            (0..ops.len()).filter(|&at| changes_names(&ops[at])).partition(|&at| at < synced);
        assert!(open.len() <= NAME_STEPS_MAX, "{open:?}");
        let mut states = BTreeSet::new();
        for subset in 0..1_u32 << open.len() {
            let chosen = (0..open.len()).filter(|bit| subset >> bit & 1 == 1).map(|bit| open[bit]);
            let names = self.names(ops, kept.iter().copied().chain(chosen));
            for contents in self.contents(ops, &names, random) {
                states.insert(State { names: names.clone(), contents });
            }
        }
        states
    }

    /// Recreates a state in `directory`, which is emptied first.
    pub(super) fn make(&self, state: &State, ops: &[Op], directory: &Path) {
        for entry in std::fs::read_dir(directory).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let mut made: BTreeMap<&DiskFile, &str> = BTreeMap::new();
        for (name, id) in &state.names {
            let path = directory.join(name);
            if let Some(first) = made.get(id) {
                // A half-done rename would leave two names of one file; renames are atomic.
                panic!("{first} and {name} are one file");
            }
            made.insert(id, name);
            let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
            if let DiskFile::Existing(before) = id {
                write_sparse(&file, &self.files[before]);
            }
            for &(step, half) in state.contents.get(id).into_iter().flatten() {
                apply(&file, &ops[step], half);
            }
        }
    }

    fn names(&self, ops: &[Op], steps: impl Iterator<Item = usize>) -> BTreeMap<String, DiskFile> {
        let mut names: BTreeMap<_, _> =
            self.files.keys().map(|name| (name.clone(), DiskFile::Existing(name.clone()))).collect();
        // Files of the names when each step was executed, whether or not the step is kept.
        let affected = self.affected(ops);
        for step in steps {
            match &ops[step] {
                Op::Open { name, .. } => {
                    names.entry(name.clone()).or_insert_with(|| affected[&step][0].clone());
                }
                Op::Rename { from, to } => {
                    let id = affected[&step][0].clone();
                    names.retain(|_, other| *other != id);
                    names.insert(to.clone(), id);
                    let _ = from;
                }
                Op::Exchange { first, second } => {
                    let ids = affected[&step].clone();
                    names.retain(|_, other| !ids.contains(other));
                    names.insert(second.clone(), ids[0].clone());
                    names.insert(first.clone(), ids[1].clone());
                }
                Op::Unlink { name } if names.get(name) == Some(&affected[&step][0]) => {
                    names.remove(name);
                }
                _ => {}
            }
        }
        names
    }

    /// Files affected by each step on names.
    fn affected(&self, ops: &[Op]) -> BTreeMap<usize, Vec<DiskFile>> {
        let mut names: BTreeMap<_, _> =
            self.files.keys().map(|name| (name.clone(), DiskFile::Existing(name.clone()))).collect();
        let mut affected = BTreeMap::new();
        for (step, op) in ops.iter().enumerate() {
            let ids = match op {
                Op::Open { name, node } => {
                    vec![names.entry(name.clone()).or_insert(DiskFile::Opened(*node)).clone()]
                }
                Op::Rename { from, to } => {
                    let id = names.remove(from).unwrap();
                    names.insert(to.clone(), id.clone());
                    vec![id]
                }
                Op::Exchange { first, second } => {
                    let ids = [first, second].map(|name| names[name].clone());
                    names.insert(second.clone(), ids[0].clone());
                    names.insert(first.clone(), ids[1].clone());
                    ids.to_vec()
                }
                Op::Unlink { name } => vec![names.remove(name).unwrap()],
                _ => continue,
            };
            affected.insert(step, ids);
        }
        affected
    }

    /// Contents that the named files may have.
    fn contents(
        &self,
        ops: &[Op],
        names: &BTreeMap<String, DiskFile>,
        random: &mut fastrand::Rng,
    ) -> Vec<BTreeMap<DiskFile, Vec<(usize, bool)>>> {
        let opened = self.opened(ops);
        let mut all = vec![BTreeMap::new()];
        // Partial files are never read.
        for (_, id) in names.iter().filter(|(name, _)| !name.ends_with(".partial")) {
            let numbers: Vec<FileNumber> =
                opened.iter().filter(|(_, of)| *of == id).map(|(node, _)| *node).collect();
            let steps: Vec<usize> = (0..ops.len())
                .filter(|&at| file_number_of(&ops[at]).is_some_and(|node| numbers.contains(&node)))
                .collect();
            let is_sync = |at: usize| matches!(ops[at], Op::Sync { .. });
            let synced = steps.iter().rposition(|&at| is_sync(at)).map_or(0, |at| at + 1);
            let (kept, open) = steps.split_at(synced);
            let subsets = subsets(open, random);
            let with = |contents: &BTreeMap<DiskFile, Vec<(usize, bool)>>| {
                let one = |subset: &Vec<(usize, bool)>| {
                    let steps = kept.iter().map(|&at| (at, false)).chain(subset.iter().copied());
                    let mut contents = contents.clone();
                    contents.insert(id.clone(), steps.filter(|&(at, _)| !is_sync(at)).collect());
                    contents
                };
                subsets.iter().map(one).collect::<Vec<_>>()
            };
            all = all.iter().flat_map(with).collect();
        }
        all
    }

    /// File opened by each node.
    fn opened(&self, ops: &[Op]) -> BTreeMap<FileNumber, DiskFile> {
        let affected = self.affected(ops);
        let opened = |(at, op): (usize, &Op)| match op {
            Op::Open { node, .. } => Some((*node, affected[&at][0].clone())),
            _ => None,
        };
        ops.iter().enumerate().filter_map(opened).collect()
    }
}

/// Subsets of the steps: all of a few; of many none, all, all but one, single ones, and random ones, some
/// with a half-written last step.
fn subsets(steps: &[usize], random: &mut fastrand::Rng) -> Vec<Vec<(usize, bool)>> {
    let of = |is_kept: &dyn Fn(usize) -> bool| -> Vec<(usize, bool)> {
        (0..steps.len()).filter(|&at| is_kept(at)).map(|at| (steps[at], false)).collect()
    };
    let mut subsets = Vec::new();
    if steps.len() <= CONTENT_STEPS_MAX {
        subsets.extend((0..1_u32 << steps.len()).map(|subset| of(&|at| subset >> at & 1 == 1)));
    } else {
        subsets.extend([of(&|_| false), of(&|_| true)]);
        for one in 0..steps.len() {
            subsets.extend([of(&|at| at == one), of(&|at| at != one)]);
        }
        subsets.extend((0..4).map(|_| {
            let bits = random.u64(..);
            of(&|at| bits >> (at % 64) & 1 == 1)
        }));
    }
    if let Some(&last) = steps.last() {
        let mut half = of(&|at| at + 1 < steps.len());
        half.push((last, true));
        subsets.push(half);
    }
    subsets
}

fn changes_names(op: &Op) -> bool {
    matches!(op, Op::Open { .. } | Op::Rename { .. } | Op::Exchange { .. } | Op::Unlink { .. })
}

fn file_number_of(op: &Op) -> Option<FileNumber> {
    match op {
        Op::Write { node, .. } | Op::SetLength { node, .. } | Op::Punch { node, .. } | Op::Sync { node } => {
            Some(*node)
        }
        _ => None,
    }
}

fn apply(file: &File, op: &Op, half: bool) {
    match op {
        Op::Write { at, bytes, .. } if half => file.write_all_at(&bytes[..bytes.len() / 2], *at).unwrap(),
        Op::Write { at, bytes, .. } => file.write_all_at(bytes, *at).unwrap(),
        Op::SetLength { length, .. } => file.set_len(*length).unwrap(),
        Op::Punch { at, length, .. } => {
            let end = (at + length).min(file.metadata().unwrap().len());
            if *at < end {
                file.write_all_at(&vec![0; (end - at) as usize], *at).unwrap();
            }
        }
        _ => {}
    }
}

/// Writes the bytes without pages of zeros, for speed.
fn write_sparse(file: &File, bytes: &[u8]) {
    file.set_len(bytes.len() as u64).unwrap();
    for (page, content) in
        bytes.chunks(4096).enumerate().filter(|(_, page)| page.iter().any(|byte| *byte != 0))
    {
        file.write_all_at(content, page as u64 * 4096).unwrap();
    }
}
