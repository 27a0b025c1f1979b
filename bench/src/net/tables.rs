//! Tables of the figures.

use serde_json::{Value, json};

use super::card::Driver;
use super::contenders::{Carrier, Entry, Work};
use super::frames::FrameKind;
use super::parameters::{Figure, Figures, Parameters, VHOST_USER_NET};
use super::tcp::Traffic;
use crate::stats::Summary;
use crate::table::{Content, Row, Table};

/// Goals, as ratios; the peer is vhost_user_net.
const TRANSMIT_MIN: f64 = 1.7;
const RECEIVE_MIN: f64 = 5.0;
const TO_GUEST_MIN: f64 = 6.0;
const FROM_GUEST_MIN: f64 = 1.2;
const REQUEST_MIN: f64 = 1.5;
const CONNECTION_MIN: f64 = 1.2;
const VETH_MIN: f64 = 0.9;
/// Of the tap, for frames of 64 B and for longer ones.
const TAP_MIN: f64 = 0.9;
const TAP_LONG_MIN: f64 = 0.95;
/// Goal of several queues against one, within the noise of most machines.
const QUEUES_MIN: f64 = 0.95;
const LARGE: usize = 64 << 10;

pub(super) struct Run<'a> {
    pub(super) parameters: &'a Parameters,
    pub(super) entries: Vec<Entry>,
    pub(super) outcomes: Vec<Figures>,
}

impl Run<'_> {
    pub(super) fn tables(&self) -> Vec<Table> {
        let mut tables = Vec::new();
        if self.parameters.multiqueue {
            tables.push(self.queues());
        } else {
            tables.push(self.series());
            tables.push(self.frames());
        }
        tables.extend([self.streams(), self.requests(), self.goals()]);
        // With --rows some tables are empty.
        tables.retain(|table| !table.rows.is_empty());
        tables
    }

    fn find(&self, entry: Entry) -> Option<&Figures> {
        let index = self.entries.iter().position(|other| *other == entry)?;
        Some(&self.outcomes[index])
    }

    fn values(&self, entry: Entry, figure: fn(&Figure) -> f64) -> Option<Vec<f64>> {
        Some(self.find(entry)?.values.iter().map(figure).collect())
    }

    fn ratio(&self, entry: Entry, base: Entry) -> Option<Summary> {
        Summary::of_ratios(&self.values(entry, rate)?, &self.values(base, rate)?)
    }

    fn beside(&self, entry: Entry, carrier: Carrier) -> Option<Summary> {
        // Limits are measured with one queue, and have no driver of their own.
        let is_limit = matches!(carrier, Carrier::Limit | Carrier::Loop);
        let (queues, driver) = if is_limit { (1, Driver::Linux) } else { (entry.queues, entry.driver) };
        self.ratio(entry, Entry { carrier, queues, driver, ..entry })
    }

    /// Returns the frames per CPU time of the thread that moves them, as a ratio to the loop on the tap.
    fn cost_beside_tap(&self, entry: Entry) -> Option<Summary> {
        let frame_ns = |figure: &Figure| figure.frame_ns;
        let limit = Entry { carrier: Carrier::Limit, queues: 1, driver: Driver::Linux, ..entry };
        Summary::of_ratios(&self.values(limit, frame_ns)?, &self.values(entry, frame_ns)?)
    }

    fn table(
        &self,
        (name, title): (&'static str, &str),
        columns: Vec<&'static str>,
        wanted: impl Fn(Work) -> bool,
        cells: impl Fn(Entry, &Figures) -> Vec<String>,
    ) -> Table {
        let rows = self.entries.iter().filter(|entry| wanted(entry.work)).map(|entry| {
            let content = match self.find(*entry) {
                Some(figures) => match &figures.failure {
                    Some(reason) => Content::Missing(reason.clone()),
                    None => Content::Measured { cells: cells(*entry, figures), data: data(figures) },
                },
                None => Content::Missing("no run".into()),
            };
            let contender = entry.contender();
            Row { group: contender.group, label: contender.label, content }
        });
        Table {
            name,
            title: format!("{title}, {} runs, median (min–max)", self.parameters.runs),
            columns,
            rows: rows.collect(),
            notes: vec![
                "× peer: against vhost_user_net; norm: the figure per % of one processor that the machine used".into(),
                "QEMU's in-process virtio-net has no socket to drive; its guest would be emulated: see docs/benchmarks.md".into(),
            ],
        }
    }

    fn frames(&self) -> Table {
        let columns = vec![
            "what",
            "Mpps",
            "× peer",
            "× tap",
            "Gbit/s",
            "ns/frame",
            "× tap by CPU",
            "backend % CPU",
            "norm kpps",
        ];
        let wanted = |work| matches!(work, Work::Transmit(_) | Work::Receive(_));
        self.table(("net-frames", "Frames"), columns, wanted, |entry, figures| {
            let len = match entry.work {
                Work::Transmit(kind) | Work::Receive(kind) => kind.len(),
                Work::Tcp(_) => 0,
            };
            let of = |scale: f64| Summary::of(figures.values.iter().map(|figure| rate(figure) * scale));
            vec![
                cell(of(1e-6), 3),
                short(self.beside(entry, Carrier::VhostUserNet)),
                short(self.beside(entry, Carrier::Limit)),
                cell(of(len as f64 * 8e-9), 2),
                median(figures, |figure| figure.frame_ns, 0),
                short(self.cost_beside_tap(entry)),
                median(figures, |figure| figure.window.backend_percent, 0),
                median(figures, |figure| norm(figure) / 1e3, 1),
            ]
        })
    }

    fn streams(&self) -> Table {
        let columns = vec![
            "what",
            "Gbit/s",
            "× peer",
            "× loop",
            "× veth",
            "backend % CPU",
            "machine % CPU",
            "norm Mbit/s",
        ];
        let wanted = |work| matches!(work, Work::Tcp(Traffic::Stream { .. }));
        self.table(("net-streams", "TCP streams"), columns, wanted, |entry, figures| {
            vec![
                cell(Summary::of(figures.values.iter().map(gigabits)), 2),
                short(self.beside(entry, Carrier::VhostUserNet)),
                short(self.beside(entry, Carrier::Loop)),
                short(self.beside(entry, Carrier::Limit)),
                median(figures, |figure| figure.window.backend_percent, 0),
                median(figures, |figure| figure.window.machine_percent, 0),
                median(figures, |figure| norm(figure) * 8.0 / 1e6, 1),
            ]
        })
    }

    fn requests(&self) -> Table {
        let columns =
            vec!["what", "1/s", "× peer", "× loop", "× veth", "p50 µs", "p99 µs", "machine % CPU", "norm"];
        let wanted = |work| matches!(work, Work::Tcp(Traffic::Request { .. }));
        self.table(("net-requests", "TCP requests and connections"), columns, wanted, |entry, figures| {
            vec![
                cell(Summary::of(figures.values.iter().map(rate)), 0),
                short(self.beside(entry, Carrier::VhostUserNet)),
                short(self.beside(entry, Carrier::Loop)),
                short(self.beside(entry, Carrier::Limit)),
                median(figures, |figure| figure.p50_us, 0),
                median(figures, |figure| figure.p99_us, 0),
                median(figures, |figure| figure.window.machine_percent, 0),
                median(figures, norm, 0),
            ]
        })
    }

    /// In the shape of the series of 2011: message sizes down, both carriers' rate and CPU beside each other.
    fn series(&self) -> Table {
        let columns = vec![
            "message",
            "Gbit/s: vhost_user_net",
            "towline",
            "× ",
            "backend % CPU: vhost_user_net",
            "towline",
        ];
        let mut rows = Vec::new();
        for to_guest in [false, true] {
            for &size in &self.parameters.stream_sizes {
                let work = Work::Tcp(Traffic::Stream { size, sessions: 1, to_guest });
                let entry = |carrier| Entry { work, queues: 1, carrier, driver: Driver::Linux };
                let of = |carrier, figure: fn(&Figure) -> f64| {
                    self.values(entry(carrier), figure).and_then(Summary::of)
                };
                let backend = |figure: &Figure| figure.window.backend_percent;
                let (peer, ours) = (Carrier::VhostUserNet, Carrier::Towline);
                if self.find(entry(ours)).is_none() {
                    continue;
                }
                let cells = vec![
                    short(of(peer, gigabits)),
                    short(of(ours, gigabits)),
                    short(self.beside(entry(ours), peer)),
                    whole(of(peer, backend)),
                    whole(of(ours, backend)),
                ];
                let data = json!({ "towline": of(ours, gigabits).map(|it| it.median) });
                let group = if to_guest { "one stream to the guest" } else { "one stream from the guest" };
                let content = Content::Measured { cells, data };
                rows.push(Row { group: group.into(), label: format!("{size} B"), content });
            }
        }
        let title = "TCP by message size, medians".into();
        let notes = vec!["–: the peer is not available".into()];
        Table { name: "net-series", title, columns, rows, notes }
    }

    /// Returns the table in the shape of QEMU's series of 2013: sizes and sessions down, queues across, with norm.
    fn queues(&self) -> Table {
        let columns = vec!["size × sessions", "1 queue", "norm", "2 queues", "norm", "4 queues", "norm"];
        let mut rows = Vec::new();
        for carrier in [Carrier::Towline, Carrier::VhostUserNet, Carrier::Testpmd] {
            let one = self.entries.iter().filter(|entry| entry.queues == 1 && entry.carrier == carrier);
            for entry in one {
                let Work::Tcp(traffic) = entry.work else { continue };
                let (what, size, sessions, figure, digits): (_, _, _, fn(&Figure) -> f64, _) = match traffic {
                    Traffic::Stream { size, sessions, to_guest: true } => {
                        ("guest receiving, Mbit/s", size, sessions, |it| gigabits(it) * 1e3, 0)
                    }
                    Traffic::Stream { size, sessions, to_guest: false } => {
                        ("guest sending, Mbit/s", size, sessions, |it| gigabits(it) * 1e3, 0)
                    }
                    Traffic::Request { size, sessions, reconnects: false } => {
                        ("TCP_RR, 1/s", size, sessions, rate, 0)
                    }
                    Traffic::Request { size, sessions, reconnects: true } => {
                        ("TCP_CRR, 1/s", size, sessions, rate, 0)
                    }
                };
                let mut cells = Vec::new();
                for queues in [1, 2, 4] {
                    let values =
                        |figure| self.values(Entry { queues, ..*entry }, figure).and_then(Summary::of);
                    cells.push(values(figure).map_or("–".into(), |it| format!("{:.digits$}", it.median)));
                    let norm = values(figure).zip(values(|it| it.window.machine_percent));
                    cells.push(norm.map_or("–".into(), |(it, cpu)| format!("{:.1}", it.median / cpu.median)));
                }
                let measured = cells[0] != "–";
                if measured {
                    let content = Content::Measured { cells, data: Value::Null };
                    let group = format!("{}: {what}", carrier.name());
                    rows.push(Row { group, label: format!("{size} B × {sessions}"), content });
                }
            }
        }
        let title = "Queues: sizes and sessions, medians".into();
        Table { name: "net-queues", title, columns, rows, notes: Vec::new() }
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
        let peer = format!("against {VHOST_USER_NET}");
        for entry in self.entries.iter().filter(|entry| entry.carrier == Carrier::Towline) {
            let against = self.beside(*entry, Carrier::VhostUserNet);
            let fewer =
                (entry.queues > 1).then(|| self.ratio(*entry, Entry { queues: 1, ..*entry })).flatten();
            match entry.work {
                Work::Transmit(kind) | Work::Receive(kind) => {
                    if kind != FrameKind::Super {
                        let least = if kind.len() > 64 { TAP_LONG_MIN } else { TAP_MIN };
                        goal(entry, "against the tap", self.beside(*entry, Carrier::Limit), least);
                    }
                    let transmits = matches!(entry.work, Work::Transmit(_));
                    let least = if transmits { TRANSMIT_MIN } else { RECEIVE_MIN };
                    goal(entry, &peer, against, least);
                }
                Work::Tcp(Traffic::Stream { size, sessions, to_guest }) => {
                    if to_guest && size == LARGE && sessions == 1 && entry.queues == 1 {
                        goal(entry, "against a veth pair", self.beside(*entry, Carrier::Limit), VETH_MIN);
                    }
                    if size >= LARGE && entry.queues == 1 {
                        goal(entry, &peer, against, if to_guest { TO_GUEST_MIN } else { FROM_GUEST_MIN });
                    }
                    goal(entry, "against one queue", fewer, QUEUES_MIN);
                }
                Work::Tcp(Traffic::Request { reconnects, .. }) => {
                    if entry.queues == 1 {
                        goal(entry, &peer, against, if reconnects { CONNECTION_MIN } else { REQUEST_MIN });
                    }
                    goal(entry, "against one queue", fewer, QUEUES_MIN);
                }
            }
        }
        Table {
            name: "net-goals",
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

/// Returns units per second and percent of a processor.
fn norm(figure: &Figure) -> f64 {
    rate(figure) / figure.window.machine_percent
}

fn median(figures: &Figures, figure: impl Fn(&Figure) -> f64, digits: usize) -> String {
    let summary = Summary::of(figures.values.iter().map(figure));
    summary.map_or_else(|| "–".into(), |it| format!("{:.digits$}", it.median))
}

fn cell(summary: Option<Summary>, digits: usize) -> String {
    summary.map_or_else(|| "–".into(), |it| format!("{it:.digits$}"))
}

fn short(summary: Option<Summary>) -> String {
    summary.map_or_else(|| "–".into(), |it| format!("{:.2}", it.median))
}

fn whole(summary: Option<Summary>) -> String {
    summary.map_or_else(|| "–".into(), |it| format!("{:.0}", it.median))
}

fn data(figures: &Figures) -> Value {
    let each = |figure: fn(&Figure) -> f64| figures.values.iter().map(figure).collect::<Vec<_>>();
    json!({
        "units-per-second": each(rate),
        "backend-percent": each(|figure| figure.window.backend_percent),
        "machine-percent": each(|figure| figure.window.machine_percent),
        "p50-us": each(|figure| figure.p50_us),
        "p99-us": each(|figure| figure.p99_us),
    })
}
