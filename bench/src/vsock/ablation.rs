//! `cargo xtask bench vsock-ablation`: what each idea of the kernel's vsock series of 2019 contributes to towline.
//!
//! ```text
//!   this program, again: towline_vsock's device with a Tuning ── as in `vsock` ── applications and driver
//! ```
//! All rows have the same host process: the library's device without the program's sandbox. They differ in one idea.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use towline_channel::Cancel;
use towline_vhost_user::{Address, Device, FrontendSource, Listener};
use towline_vsock::{Ablation, ConnectionLimits, LocalGuests, Settings, Vsock, ZeroCopySend};

use super::entry::{Buffers, CID, Carrier, Direction, Entry, Figure, Figures, Parameters, Work, bytes};
use super::runs::run;
use super::variant::{ROLE_OPTION, Variant};
use crate::rounds::{self, Contender};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

/// Busy-polling of the program's default.
const BUSY_POLL: Duration = Duration::from_micros(50);

/// A device that this process hosts.
#[derive(Debug)]
pub struct Hosted {
    ablation: Ablation,
    socket: PathBuf,
    uds: PathBuf,
}

/// Returns the device that the command line has the process host.
pub fn hosted(words: &[OsString]) -> Option<Hosted> {
    let [_, option, variant, socket, uds] = words else { return None };
    let variant = Variant::ALL.into_iter().find(|known| *variant == *known.name())?;
    let (socket, uds) = (socket.into(), uds.into());
    (option == ROLE_OPTION).then(|| Hosted { ablation: variant.ablation(), socket, uds })
}

impl Hosted {
    /// Serves frontends until the process is killed.
    ///
    /// # Errors
    /// A socket is not available.
    pub fn serve(self) -> Result<()> {
        let settings = Settings {
            cid: CID,
            uds: Some(self.uds),
            uds_seqpacket: None,
            rules: Vec::new(),
            groups: Vec::new(),
            limits: ConnectionLimits::default(),
            zero_copy_send: ZeroCopySend::Auto,
            busy_poll: BUSY_POLL,
            unmigratable: false,
            ablation: self.ablation,
        };
        let device: Arc<dyn Device> = Arc::new(Vsock::new(settings, &Arc::new(LocalGuests::default()))?);
        let listener = Listener::bind(&Address::Unix(self.socket)).context("socket of the frontend")?;
        Ok(FrontendSource::Listen(listener).serve(&device, &Cancel::new()?)?)
    }
}

/// Streams on which an idea shows.
const WORKS: [(Work, Buffers); 6] = [
    (stream(64, Direction::FromGuest), Buffers::Linux),
    (stream(4 << 10, Direction::FromGuest), Buffers::Linux),
    (stream(64 << 10, Direction::FromGuest), Buffers::Linux),
    (stream(4 << 10, Direction::ToGuest), Buffers::Linux),
    (stream(64 << 10, Direction::ToGuest), Buffers::Linux),
    (stream(64 << 10, Direction::ToGuest), Buffers::Large),
];

const fn stream(size: usize, direction: Direction) -> Work {
    Work::Stream { size, connections: 1, direction }
}

/// Measures the table.
///
/// # Errors
/// The run was cancelled.
pub fn measure(parameters: &Parameters) -> Result<Vec<Table>> {
    ensure!(parameters.own.is_file(), "{}: no such program", parameters.own.display());
    let entry = |(work, buffers)| {
        Variant::ALL.map(|variant| Entry { work, buffers, carrier: Carrier::Tuned(variant) })
    };
    let entries: Vec<Entry> = WORKS.into_iter().flat_map(entry).collect();
    let contenders: Vec<Contender> = entries.iter().map(Entry::contender).collect();
    let outcomes = rounds::run(&contenders, parameters.runs, &parameters.cancel, |index| {
        run(parameters, entries[index])
    })?;
    let rows = entries.chunks(Variant::ALL.len()).zip(outcomes.chunks(Variant::ALL.len()));
    let rows = rows.flat_map(|(entries, outcomes)| {
        entries.iter().zip(outcomes).map(|(entry, outcome)| row(*entry, outcome, &outcomes[0]))
    });
    Ok(vec![Table {
        name: "vsock-ablation",
        title: format!("vsock streams without one idea each, {} runs, median (min–max)", parameters.runs),
        columns: vec!["what", "Gbit/s", "× all ideas", "Mbit/s per % CPU"],
        rows: rows.collect(),
        notes: vec![format!(
            "one stream; messages of {} to {}; packets of 4 KiB: of both the guest and the device",
            bytes(64),
            bytes(64 << 10)
        )],
    }])
}

fn row(entry: Entry, figures: &Figures, all: &Figures) -> Row {
    let contender = entry.contender();
    let content = match &figures.failure {
        Some(reason) => Content::Missing(reason.clone()),
        None => {
            let of = |figures: &Figures, figure: fn(&Figure) -> f64| {
                figures.values.iter().map(figure).collect::<Vec<f64>>()
            };
            let text = |summary: Option<Summary>, digits: usize| {
                summary.map_or_else(|| "–".into(), |it| format!("{it:.digits$}"))
            };
            let rates = of(figures, Figure::gigabits);
            let ratio = Summary::of_ratios(&rates, &of(all, Figure::gigabits));
            let cells = vec![
                text(Summary::of(rates.iter().copied()), 2),
                text(ratio, 2),
                text(Summary::of(of(figures, Figure::efficiency)), 1),
            ];
            Content::Measured { cells, data: json!({ "gbit-per-second": rates }) }
        }
    };
    Row { group: contender.group, label: contender.label, content }
}

#[cfg(test)]
mod tests {
    use super::super::variant::arguments;
    use super::*;

    #[test]
    fn the_command_line_of_a_hosted_device_is_parsed() {
        let words = |variant| {
            let words = arguments(variant, "s", "u").map(OsString::from);
            [OsString::from("bench")].into_iter().chain(words).collect::<Vec<_>>()
        };
        for variant in Variant::ALL {
            let hosted = hosted(&words(variant)).unwrap();
            assert_eq!((hosted.ablation, hosted.socket), (variant.ablation(), PathBuf::from("s")));
            assert_eq!(variant == Variant::All, variant.ablation() == Ablation::default());
        }
        assert!(hosted(&["bench", "vsock", "--runs", "3", "x"].map(OsString::from)).is_none());
    }
}
