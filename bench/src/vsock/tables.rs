//! Tables of the figures.

use serde_json::{Value, json};

use super::entry::{Buffers, Carrier, Direction, Entry, Figure, Figures, PEER, Parameters, Work, bytes};
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

/// Goals, as ratios.
const TO_GUEST_PEER_MIN: f64 = 5.0;
const TO_GUEST_SMALL_SOCKET_MIN: f64 = 0.95;
const FROM_GUEST_PEER_MIN: f64 = 2.5;
const FROM_GUEST_SMALL_PEER_MIN: f64 = 3.0;
const LARGE_SOCKET_MIN: f64 = 0.75;
const LARGE_BUFFERS_SOCKET_MIN: f64 = 0.9;
const REQUEST_MIN: f64 = 2.5;
const CONNECT_MIN: f64 = 2.5;
const SMALL: usize = 256;
const MEDIUM: usize = 4 << 10;
const LARGE: usize = 16 << 10;
/// Columns of the series: the labels, and the published sizes.
const SERIES_COLUMNS: [&str; 16] = [
    "", "32 B", "64 B", "128 B", "256 B", "512 B", "1 KiB", "2 KiB", "4 KiB", "8 KiB", "16 KiB", "32 KiB",
    "64 KiB", "128 KiB", "256 KiB", "512 KiB",
];

/// A unit of the series.
struct Unit {
    name: &'static str,
    figure: fn(&Figure) -> f64,
    digits: usize,
}

const UNITS: [Unit; 2] = [
    Unit { name: "Gbit/s", figure: Figure::gigabits, digits: 2 },
    Unit { name: "Mbit/s per % CPU", figure: Figure::efficiency, digits: 0 },
];

/// A row that was published with the kernel's series of 2019.
struct Published {
    direction: Direction,
    unit: &'static str,
    label: &'static str,
    /// By message size in bytes.
    figures: &'static [(usize, f64)],
}

const BEFORE: &str = "kernel, 2019, before";
const AFTER: &str = "kernel, 2019, after";
const KIB: usize = 1 << 10;
const PUBLISHED: [Published; 8] = [
    Published {
        direction: Direction::ToGuest,
        unit: "Gbit/s",
        label: BEFORE,
        figures: &[
            (64, 0.069),
            (KIB, 0.951),
            (4 * KIB, 3.6),
            (16 * KIB, 8.41),
            (64 * KIB, 21.1),
            (256 * KIB, 21.6),
        ],
    },
    Published {
        direction: Direction::ToGuest,
        unit: "Gbit/s",
        label: AFTER,
        figures: &[
            (64, 0.126),
            (KIB, 1.887),
            (4 * KIB, 6.84),
            (16 * KIB, 17.46),
            (64 * KIB, 21.8),
            (256 * KIB, 23.5),
        ],
    },
    Published {
        direction: Direction::FromGuest,
        unit: "Gbit/s",
        label: BEFORE,
        figures: &[
            (64, 0.09),
            (KIB, 1.34),
            (4 * KIB, 5.16),
            (16 * KIB, 11.6),
            (64 * KIB, 10.3),
            (128 * KIB, 10.1),
        ],
    },
    Published {
        direction: Direction::FromGuest,
        unit: "Gbit/s",
        label: AFTER,
        figures: &[
            (64, 0.109),
            (KIB, 1.65),
            (4 * KIB, 5.87),
            (16 * KIB, 15.8),
            (64 * KIB, 37.2),
            (128 * KIB, 39.3),
        ],
    },
    Published {
        direction: Direction::ToGuest,
        unit: "Mbit/s per % CPU",
        label: BEFORE,
        figures: &[(64 * KIB, 237.0)],
    },
    Published {
        direction: Direction::ToGuest,
        unit: "Mbit/s per % CPU",
        label: AFTER,
        figures: &[(64 * KIB, 454.0)],
    },
    Published {
        direction: Direction::FromGuest,
        unit: "Mbit/s per % CPU",
        label: BEFORE,
        figures: &[(64 * KIB, 142.0)],
    },
    Published {
        direction: Direction::FromGuest,
        unit: "Mbit/s per % CPU",
        label: AFTER,
        figures: &[(64 * KIB, 433.0)],
    },
];

pub(super) struct Run<'a> {
    pub(super) parameters: &'a Parameters,
    pub(super) entries: Vec<Entry>,
    pub(super) outcomes: Vec<Figures>,
}

impl Run<'_> {
    pub(super) fn tables(&self) -> Vec<Table> {
        let tables = vec![
            self.series(),
            self.streams("vsock-to-guest", "to the guest", Direction::ToGuest),
            self.streams("vsock-from-guest", "from the guest", Direction::FromGuest),
            self.requests(),
            self.goals(),
        ];
        // `--rows` leaves some of them out.
        let is_whole = self.parameters.rows.is_empty();
        tables.into_iter().filter(|table| is_whole || !table.rows.is_empty()).collect()
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
                cell(Summary::of(figures.values.iter().map(Figure::gigabits)), 2),
                short(self.ratio(entry, Carrier::Peer, Figure::gigabits)),
                short(self.ratio(entry, Carrier::Socket, Figure::gigabits)),
                cell(Summary::of(figures.values.iter().map(Figure::efficiency)), 1),
                short(self.ratio(entry, Carrier::Peer, Figure::efficiency)),
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
        for &connections in &self.parameters.connections {
            let streams = if connections == 1 { String::new() } else { format!(", {connections} streams") };
            for (direction, buffers, what) in [
                (Direction::ToGuest, Buffers::Linux, "host → guest, buffers of 4 KiB"),
                (Direction::ToGuest, Buffers::Large, "host → guest, buffers of 64 KiB"),
                (Direction::FromGuest, Buffers::Linux, "guest → host"),
            ] {
                let is_measured = |entry: &Entry| match entry.work {
                    Work::Stream { connections: count, direction: way, .. } => {
                        (count, way, entry.buffers) == (connections, direction, buffers)
                    }
                    Work::Request { .. } => false,
                };
                if !self.entries.iter().any(is_measured) {
                    continue;
                }
                for Unit { name: unit, figure, digits } in UNITS {
                    let group = format!("{what}{streams}, {unit}");
                    for carrier in [Carrier::Peer, Carrier::Towline, Carrier::Socket] {
                        let of = |size| {
                            let work = Work::Stream { size, connections, direction };
                            let figures = self.find(Entry { work, buffers, carrier })?;
                            Some(Summary::of(figures.values.iter().map(figure))?.median)
                        };
                        rows.push(self.across(&group, carrier.name(), &columns, digits, of));
                    }
                    let published = PUBLISHED
                        .iter()
                        .filter(|it| connections == 1 && it.direction == direction && it.unit == unit);
                    for series in published {
                        let of = |size| series.figures.iter().find(|it| it.0 == size).map(|it| it.1);
                        rows.push(self.across(&group, series.label, &columns, digits, of));
                    }
                }
            }
        }
        Table {
            name: "vsock-series",
            title: "vsock throughput by message size, medians".into(),
            columns,
            rows,
            notes: vec![
                "% CPU: of one processor, both sides together".into(),
                "kernel, 2019: published figures of vhost-vsock before and after the series, on another machine".into(),
            ],
        }
    }

    /// Returns a row of the series.
    fn across(
        &self,
        group: &str,
        label: &str,
        columns: &[&str],
        digits: usize,
        of: impl Fn(usize) -> Option<f64>,
    ) -> Row {
        let at = |column: &&str| of(*self.parameters.sizes.iter().find(|size| bytes(**size) == **column)?);
        let figures: Vec<Option<f64>> = columns[1..].iter().map(at).collect();
        let text = |figure: &Option<f64>| figure.map_or_else(|| "–".into(), |it| format!("{it:.digits$}"));
        let content = Content::Measured { cells: figures.iter().map(text).collect(), data: json!(figures) };
        Row { group: group.into(), label: label.into(), content }
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
            let socket = self.ratio(*entry, Carrier::Socket, Figure::gigabits);
            match entry.work {
                Work::Stream { size, connections: 1, direction } => {
                    let to_guest = direction == Direction::ToGuest;
                    let has_linux_buffers = entry.buffers == Buffers::Linux;
                    if to_guest && size >= MEDIUM && has_linux_buffers {
                        goal(entry, "rate against the peer", peer(Figure::gigabits), TO_GUEST_PEER_MIN);
                    }
                    if to_guest && size <= SMALL {
                        goal(entry, "rate against the Unix socket", socket, TO_GUEST_SMALL_SOCKET_MIN);
                    }
                    if !to_guest {
                        let least =
                            if size > MEDIUM { FROM_GUEST_PEER_MIN } else { FROM_GUEST_SMALL_PEER_MIN };
                        goal(entry, "rate against the peer", peer(Figure::gigabits), least);
                    }
                    if size >= LARGE {
                        let least =
                            if has_linux_buffers { LARGE_SOCKET_MIN } else { LARGE_BUFFERS_SOCKET_MIN };
                        goal(entry, "rate against the Unix socket", socket, least);
                    }
                    goal(entry, "efficiency against the peer", peer(Figure::efficiency), 1.0);
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

impl Figure {
    pub(super) fn gigabits(&self) -> f64 {
        self.window.rate() * 8.0 / 1e9
    }

    /// Returns Mbit/s per percent of a processor.
    pub(super) fn efficiency(&self) -> f64 {
        self.gigabits() * 1e3 / self.window.cpu_percent
    }
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
