//! Tables of the figures.

use serde_json::{Value, json};

use super::{Buffers, Carrier, Direction, Entry, Figure, Figures, PEER, Parameters, Work, bytes};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

/// Goals, as ratios.
const TO_GUEST_PEER_MIN: f64 = 5.0;
const TO_GUEST_SMALL_SOCKET_MIN: f64 = 0.95;
const FROM_GUEST_PEER_MIN: f64 = 2.5;
const FROM_GUEST_SMALL_PEER_MIN: f64 = 3.0;
const LARGE_SOCKET_MIN: f64 = 0.6;
const REQUEST_MIN: f64 = 1.5;
const CONNECT_MIN: f64 = 2.5;
const SMALL: usize = 256;
const MEDIUM: usize = 4 << 10;
const LARGE: usize = 16 << 10;
/// Columns of the series: the labels, and the published sizes.
const SERIES_COLUMNS: [&str; 16] = [
    "", "32 B", "64 B", "128 B", "256 B", "512 B", "1 KiB", "2 KiB", "4 KiB", "8 KiB", "16 KiB", "32 KiB",
    "64 KiB", "128 KiB", "256 KiB", "512 KiB",
];

pub(super) struct Run<'a> {
    pub(super) parameters: &'a Parameters,
    pub(super) entries: Vec<Entry>,
    pub(super) outcomes: Vec<Figures>,
}

impl Run<'_> {
    pub(super) fn tables(&self) -> Vec<Table> {
        vec![
            self.series(),
            self.streams("vsock-to-guest", "to the guest", Direction::ToGuest),
            self.streams("vsock-from-guest", "from the guest", Direction::FromGuest),
            self.requests(),
            self.goals(),
        ]
    }

    fn find(&self, entry: Entry) -> Option<&Figures> {
        let index = self.entries.iter().position(|other| *other == entry)?;
        Some(&self.outcomes[index])
    }

    fn ratio(&self, entry: Entry, base: Carrier, figure: fn(&Figure) -> f64) -> Option<Summary> {
        let of = |entry| Some(self.find(entry)?.values.iter().map(figure).collect::<Vec<_>>());
        Summary::of_ratios(&of(entry)?, &of(Entry { carrier: base, ..entry })?)
    }

    fn streams(&self, name: &'static str, what: &str, wanted: Direction) -> Table {
        let rows = self.entries.iter().filter_map(|entry| match entry.work {
            Work::Stream { direction, .. } if direction == wanted => Some(self.stream(*entry)),
            _ => None,
        });
        Table {
            name,
            title: format!("vsock streams {what}, {} runs, median (min–max)", self.parameters.runs),
            columns: vec!["what", "Gbit/s", "× peer", "× Unix socket", "Mbit/s per % CPU", "× peer's"],
            rows: rows.collect(),
            notes: vec![
                format!(
                    "peer: {PEER} 0.3; CPU: backend, applications and driver together; see docs/benchmarks.md"
                ),
                "Linux's receive buffers are of 4 KiB; a packet carries at most 64 KiB either way".into(),
            ],
        }
    }

    fn stream(&self, entry: Entry) -> Row {
        let cells = |figures: &Figures| {
            vec![
                cell(Summary::of(figures.values.iter().map(gigabits)), 2),
                short(self.ratio(entry, Carrier::Peer, gigabits)),
                short(self.ratio(entry, Carrier::Socket, gigabits)),
                cell(Summary::of(figures.values.iter().map(efficiency)), 1),
                short(self.ratio(entry, Carrier::Peer, efficiency)),
            ]
        };
        self.row(entry, cells)
    }

    fn requests(&self) -> Table {
        let rows = self.entries.iter().filter_map(|entry| match entry.work {
            Work::Request { .. } => Some(self.request(*entry)),
            Work::Stream { .. } => None,
        });
        Table {
            name: "vsock-requests",
            title: format!(
                "Requests to the guest over vsock, {} runs, median (min–max)",
                self.parameters.runs
            ),
            columns: vec!["what", "1/s", "× peer", "× Unix socket", "p50 µs", "p99 µs", "1/s per % CPU"],
            rows: rows.collect(),
            notes: vec!["connections: CONNECT, its OK, request, response, close".into()],
        }
    }

    fn request(&self, entry: Entry) -> Row {
        let cells = |figures: &Figures| {
            let of = |figure: fn(&Figure) -> f64, digits| {
                cell(Summary::of(figures.values.iter().map(figure)), digits)
            };
            vec![
                of(rate, 0),
                short(self.ratio(entry, Carrier::Peer, rate)),
                short(self.ratio(entry, Carrier::Socket, rate)),
                of(|figure| figure.p50_us, 0),
                of(|figure| figure.p99_us, 0),
                of(|figure| rate(figure) / figure.window.cpu_percent, 0),
            ]
        };
        self.row(entry, cells)
    }

    fn row(&self, entry: Entry, cells: impl Fn(&Figures) -> Vec<String>) -> Row {
        let content = match self.find(entry) {
            Some(figures) => match &figures.failure {
                Some(reason) => Content::Missing(reason.clone()),
                None => Content::Measured { cells: cells(figures), data: data(figures) },
            },
            None => Content::Missing("no run".into()),
        };
        let contender = entry.contender();
        Row { group: contender.group, label: contender.label, content }
    }

    /// Returns the table in the shape of the kernel's series of 2019: sizes across, contenders down.
    fn series(&self) -> Table {
        let known = |column: &&str| self.parameters.sizes.iter().any(|size| bytes(*size) == **column);
        let columns: Vec<&str> =
            SERIES_COLUMNS.into_iter().filter(|column| column.is_empty() || known(column)).collect();
        let mut rows = Vec::new();
        for (direction, buffers, what) in [
            (Direction::ToGuest, Buffers::Linux, "host → guest, buffers of 4 KiB"),
            (Direction::ToGuest, Buffers::Large, "host → guest, buffers of 64 KiB"),
            (Direction::FromGuest, Buffers::Linux, "guest → host"),
        ] {
            for (unit, figure, digits) in
                [("Gbit/s", gigabits as fn(&Figure) -> f64, 2), ("Mbit/s per % CPU", efficiency, 0)]
            {
                for carrier in [Carrier::Peer, Carrier::Towline, Carrier::Socket] {
                    let at = |column: &&str| {
                        let size = self.parameters.sizes.iter().find(|size| bytes(**size) == **column)?;
                        let work = Work::Stream { size: *size, connections: 1, direction };
                        let figures = self.find(Entry { work, buffers, carrier })?;
                        Summary::of(figures.values.iter().map(figure))
                    };
                    let medians: Vec<_> = columns[1..].iter().map(at).collect();
                    let text = |median: &Option<Summary>| {
                        median.map_or_else(|| "–".into(), |it| format!("{:.digits$}", it.median))
                    };
                    let data = json!(medians.iter().map(|it| it.map(|it| it.median)).collect::<Vec<_>>());
                    rows.push(Row {
                        group: format!("{what}, {unit}"),
                        label: carrier.name().into(),
                        content: Content::Measured { cells: medians.iter().map(text).collect(), data },
                    });
                }
            }
        }
        Table {
            name: "vsock-series",
            title: "vsock throughput by message size, one stream, medians".into(),
            columns,
            rows,
            notes: vec!["% CPU: of one processor, both sides together".into()],
        }
    }

    fn goals(&self) -> Table {
        let mut rows = Vec::new();
        let mut goal = |entry: &Entry, what: &str, ratio: Option<Summary>, least: f64| {
            let Some(ratio) = ratio else { return };
            let met = ratio.median >= least;
            let cells = vec![ratio.to_string(), format!("≥ {least}"), if met { "yes" } else { "no" }.into()];
            let content = Content::Measured { cells, data: json!({ "ratio": ratio.median, "met": met }) };
            rows.push(Row { group: entry.contender().group, label: what.into(), content });
        };
        for entry in self.entries.iter().filter(|entry| entry.carrier == Carrier::Towline) {
            let peer = |figure| self.ratio(*entry, Carrier::Peer, figure);
            let socket = self.ratio(*entry, Carrier::Socket, gigabits);
            match entry.work {
                Work::Stream { size, connections: 1, direction } => {
                    let to_guest = direction == Direction::ToGuest;
                    if to_guest && size >= MEDIUM {
                        goal(entry, "rate against the peer", peer(gigabits), TO_GUEST_PEER_MIN);
                    }
                    if to_guest && size <= SMALL {
                        goal(entry, "rate against the Unix socket", socket, TO_GUEST_SMALL_SOCKET_MIN);
                    }
                    if !to_guest {
                        let least =
                            if size >= MEDIUM { FROM_GUEST_PEER_MIN } else { FROM_GUEST_SMALL_PEER_MIN };
                        goal(entry, "rate against the peer", peer(gigabits), least);
                    }
                    if size >= LARGE {
                        goal(entry, "rate against the Unix socket", socket, LARGE_SOCKET_MIN);
                    }
                    goal(entry, "efficiency against the peer", peer(efficiency), 1.0);
                }
                Work::Request { connections: 1, reconnects, .. } => {
                    let least = if reconnects { CONNECT_MIN } else { REQUEST_MIN };
                    goal(entry, "rate against the peer", peer(rate), least);
                }
                _ => {}
            }
        }
        Table {
            name: "vsock-goals",
            title: "Ratios, round by round, against their goals".into(),
            columns: vec!["what", "ratio", "goal", "met"],
            rows,
            notes: Vec::new(),
        }
    }
}

fn rate(figure: &Figure) -> f64 {
    figure.window.rate()
}

fn gigabits(figure: &Figure) -> f64 {
    figure.window.rate() * 8.0 / 1e9
}

/// Returns Mbit/s per percent of a processor.
fn efficiency(figure: &Figure) -> f64 {
    gigabits(figure) * 1e3 / figure.window.cpu_percent
}

fn cell(summary: Option<Summary>, digits: usize) -> String {
    summary.map_or_else(|| "–".into(), |it| format!("{it:.digits$}"))
}

fn short(summary: Option<Summary>) -> String {
    summary.map_or_else(|| "–".into(), |it| format!("{:.2}", it.median))
}

fn data(figures: &Figures) -> Value {
    let each = |figure: fn(&Figure) -> f64| figures.values.iter().map(figure).collect::<Vec<_>>();
    json!({
        "units-per-second": each(rate),
        "cpu-percent": each(|figure| figure.window.cpu_percent),
        "backend-percent": each(|figure| figure.window.backend_percent),
        "p50-us": each(|figure| figure.p50_us),
        "p99-us": each(|figure| figure.p99_us),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_series_has_a_column_for_each_published_size() {
        let cancel = towline_channel::Cancel::new().unwrap();
        let parameters = Parameters::of(std::path::Path::new("towline"), None, 1, cancel);
        let sizes: Vec<String> = parameters.sizes.iter().map(|size| bytes(*size)).collect();
        assert_eq!(sizes, SERIES_COLUMNS[1..]);
    }
}
