//! Cards of a protected guest, which hold the frames that it sends: `towline net`, by its control socket.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};
use towline_qmp::{self as qmp, Client};

/// Timeout of a command: the guest stands while a checkpoint is marked.
const DEADLINE: Duration = Duration::from_secs(2);

/// Time for a card to answer, and the interval of attempts.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);
const ANSWER_INTERVAL: Duration = Duration::from_millis(100);

/// Control sockets of all cards of a guest, in one generation.
#[derive(Debug)]
pub(crate) struct HoldingCards {
    clients: Vec<Client>,
    generation: u64,
}

impl HoldingCards {
    /// Connects to them for a generation, and has each hold from now on.
    pub(crate) fn hold(paths: &[PathBuf], generation: u64) -> Result<Self, qmp::Error> {
        let clients = paths.iter().map(|path| connect(path, DEADLINE)).collect::<Result<_, _>>()?;
        let mut cards = Self { clients, generation };
        cards.execute("hold", &[])?;
        Ok(cards)
    }

    /// Has all of these cards send what they hold, and hold no more. One that has died may be started again meanwhile.
    pub(crate) fn pass_all(paths: &[PathBuf], generation: u64) -> Result<(), qmp::Error> {
        let deadline = Instant::now() + ANSWERS_WITHIN;
        loop {
            match Self::hold(paths, generation).and_then(|mut cards| cards.execute("pass", &[])) {
                Err(_) if Instant::now() < deadline => thread::sleep(ANSWER_INTERVAL),
                passed => return passed,
            }
        }
    }

    /// The highest generation that one of these cards knows; 0 for none.
    pub(crate) fn generation(paths: &[PathBuf]) -> Result<u64, qmp::Error> {
        let known = paths.iter().map(|path| {
            let held = connect(path, DEADLINE)?.execute_raw("query-held", None)?;
            Ok(held["generation"].as_u64().unwrap_or_default())
        });
        known.collect::<Result<Vec<_>, _>>().map(|known| known.into_iter().max().unwrap_or_default())
    }

    /// Closes the open epoch of each.
    pub(crate) fn mark(&mut self, epoch: u64) -> Result<(), qmp::Error> {
        self.execute("mark", &[("epoch", epoch.into())])
    }

    /// Sends what was held up to this epoch.
    pub(crate) fn release(&mut self, epoch: u64) -> Result<(), qmp::Error> {
        self.execute("release", &[("epoch", epoch.into())])
    }

    /// Waits for this time until a card holds a frame of its open epoch, or has no room. Returns whether one does.
    pub(crate) fn wait_for_output(&mut self, within: Duration) -> Result<bool, qmp::Error> {
        // All but one are looked at.
        let (last, mut has_output) = (self.clients.len().saturating_sub(1), false);
        for (index, client) in self.clients.iter_mut().enumerate() {
            let wait = if index == last && !has_output { within.as_millis() as u64 } else { 0 };
            let arguments = Map::from_iter([("wait-ms".to_owned(), wait.into())]);
            let held = client.execute_raw("query-held", Some(arguments))?;
            has_output |= held["open-frames"].as_u64().unwrap_or_default() > 0 || held["full"] == true;
        }
        Ok(has_output)
    }

    fn execute(&mut self, name: &str, arguments: &[(&str, Value)]) -> Result<(), qmp::Error> {
        let arguments = arguments.iter().map(|(key, value)| ((*key).to_owned(), value.clone()));
        let generation = ("generation".to_owned(), self.generation.into());
        let arguments: Map<_, _> = arguments.chain([generation]).collect();
        for client in &mut self.clients {
            client.execute_raw(name, Some(arguments.clone()))?;
        }
        Ok(())
    }
}

/// Connects to the control socket of a card, which has this time for each reply.
pub(crate) fn connect(path: &Path, within: Duration) -> Result<Client, qmp::Error> {
    let options = qmp::Options { deadline: within, greeting_deadline: within, ..qmp::Options::default() };
    Client::connect(path, &options)
}
