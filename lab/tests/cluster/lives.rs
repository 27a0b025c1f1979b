//! Where each guest has run, from outside: by the numbers that it counts on its serial port, which is a file of each host.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Interval at which the files are looked at.
const INTERVAL: Duration = Duration::from_millis(20);

/// A guest at one host, from its first number there.
#[derive(Debug, Clone)]
pub(crate) struct Life {
    pub(crate) node: usize,
    pub(crate) from: Instant,
    pub(crate) to: Instant,
    pub(crate) first: u64,
    pub(crate) last: u64,
    /// Longest time between two numbers.
    pub(crate) gap: Duration,
}

/// Watches the files `nodeN/GUEST.ticks` below a directory until it is dropped.
pub(crate) struct Watch {
    lives: Arc<Mutex<HashMap<String, Vec<Life>>>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

/// Part of a file that was read.
#[derive(Default)]
struct Position {
    offset: u64,
    rest: String,
}

impl Watch {
    pub(crate) fn start(place: &Path, guests: &[&str]) -> Self {
        let lives: Arc<Mutex<HashMap<String, Vec<Life>>>> = Arc::default();
        let is_over = Arc::new(AtomicBool::new(false));
        let files: Vec<_> = (1..=3)
            .flat_map(|node| guests.iter().map(move |guest| (node, (*guest).to_owned())))
            .map(|(node, guest)| (node, place.join(format!("node{node}/{guest}.ticks")), guest))
            .collect();
        let (written, over) = (Arc::clone(&lives), Arc::clone(&is_over));
        let watch = move || {
            let mut positions: HashMap<PathBuf, Position> = HashMap::new();
            while !over.load(Ordering::Relaxed) {
                for (node, path, guest) in &files {
                    let position = positions.entry(path.clone()).or_default();
                    for number in position.numbers(path) {
                        add(written.lock().unwrap().entry(guest.clone()).or_default(), *node, number);
                    }
                }
                thread::sleep(INTERVAL);
            }
        };
        Self { lives, is_over, thread: Some(thread::spawn(watch)) }
    }

    /// Lives of a guest, in the order of their beginnings.
    pub(crate) fn lives(&self, guest: &str) -> Vec<Life> {
        self.lives.lock().unwrap().get(guest).cloned().unwrap_or_default()
    }

    pub(crate) fn last(&self, guest: &str) -> Life {
        self.lives(guest).pop().unwrap()
    }

    /// Two lives of one guest are never at the same time: one that has counted on in another place counts no further.
    pub(crate) fn assert_never_two(&self) {
        for (guest, lives) in self.lives.lock().unwrap().iter() {
            for (n, later) in lives.iter().enumerate() {
                for earlier in &lives[..n] {
                    assert!(
                        earlier.to <= later.from || earlier.last < later.first,
                        "{guest} ran twice: {earlier:?} {later:?}"
                    );
                }
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

impl Position {
    /// Numbers that were written since the last call.
    fn numbers(&mut self, path: &Path) -> Vec<u64> {
        let Ok(mut file) = File::open(path) else { return Vec::new() };
        // A QEMU that is started begins the file again.
        if fs::metadata(path).map_or(0, |found| found.len()) < self.offset {
            *self = Self::default();
        }
        let mut bytes = Vec::new();
        if file.seek(SeekFrom::Start(self.offset)).and_then(|_| file.read_to_end(&mut bytes)).is_err() {
            return Vec::new();
        }
        self.offset += bytes.len() as u64;
        self.rest.push_str(&String::from_utf8_lossy(&bytes));
        let Some((whole, rest)) = self.rest.rsplit_once('\n') else { return Vec::new() };
        let numbers =
            whole.lines().filter_map(|line| line.trim().strip_prefix("tick ")?.parse().ok()).collect();
        self.rest = rest.to_owned();
        numbers
    }
}

fn add(lives: &mut Vec<Life>, node: usize, number: u64) {
    let now = Instant::now();
    let newest = lives.iter().rposition(|life| life.node == node);
    // It has come back if it was elsewhere since, unless it goes on there, which is a second guest.
    match newest {
        Some(index)
            if number == lives[index].last + 1
                || (index + 1 == lives.len() && number == lives[index].last + 2) =>
        {
            let life = &mut lives[index];
            (life.gap, life.to, life.last) = (life.gap.max(now - life.to), now, number);
        }
        _ => lives.push(Life { node, from: now, to: now, first: number, last: number, gap: Duration::ZERO }),
    }
}
