//! One pair: judged, migrated by QEMU itself, moved by towline.

use std::fmt;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
pub(crate) use towline_lab::expect::qmp as endpoint;
use towline_lab::{Finished, Network, Qemu, SshHost, Sshd, Towline, towline, wait_until};

use crate::table::Pair;

/// Timeout of anything that must happen.
pub(crate) const WITHIN: Duration = Duration::from_secs(60);
/// Time for events that need not happen. It passes only where the guest does not run on, and then QEMU mostly
/// fails at once.
const OUTCOME_WITHIN: Duration = Duration::from_secs(30);
/// Time limit of a QEMU's exit after it has closed the connection.
const EXIT_WITHIN: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Verdicts on a pair, and its outcome.
pub(crate) struct Row {
    name: String,
    by_hand: String,
    stock: String,
    verdict: String,
    moved: String,
    /// Disagreements.
    pub(crate) wrong: Option<String>,
}

impl Row {
    pub(crate) const HEADING: &str =
        "pair                                        by hand          stock QEMU      towline          move";
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, by_hand, stock, verdict, moved, wrong } = self;
        write!(f, "{name:<42}  {by_hand:<15}  {stock:<14}  {verdict:<15}  {moved}")?;
        wrong.as_ref().map_or(Ok(()), |wrong| write!(f, "  <-- {wrong}"))
    }
}

/// End of towline's move.
#[derive(Debug, PartialEq, Eq)]
enum Moved {
    Done,
    /// With its message; the guest runs on.
    Refused(String),
}

/// Both QEMUs, and their directories. The network is dropped last.
struct Ends {
    source: Qemu,
    destination: Qemu,
    _third: Option<Qemu>,
    _network: Option<Network>,
}

/// Another host, with the same files, by OpenSSH.
pub(crate) struct Hosts {
    here: Network,
    there: SshHost,
}

impl Hosts {
    const ADDRESSES: [&str; 2] = ["10.213.79.1", "10.213.79.2"];

    pub(crate) fn new(sshd: &Sshd) -> anyhow::Result<Self> {
        let [here, there] = Network::pair(Self::ADDRESSES)?;
        Ok(Self { here, there: SshHost::new(sshd, there, Self::ADDRESSES[1])? })
    }

    /// Runs a command of towline on a guest, and a QEMU that waits on the other host.
    fn run(&self, command: &str, ends: &Ends, options: &[&str]) -> Finished {
        let (source, place) = (endpoint(&ends.source), format!("ssh:other/{}", endpoint(&ends.destination)));
        let client = self.there.client();
        let words = [command, &source, &place, "--ssh", &client, "--shared-disks"];
        let words = [&words, options].concat();
        Towline::start_after(&self.here.prefix(), &words).unwrap().wait(WITHIN).unwrap()
    }
}

/// Runs one pair between two hosts: judged and moved by towline.
pub(crate) fn judge_between(pair: &Pair, hosts: &Hosts) -> Row {
    let ends = start(pair);
    let report = report(hosts.run("check", &ends, &["--json"]));
    drop(ends);
    let finished = move_it(pair, &|ends| hosts.run("move", ends, &[]));
    row(pair, &report, None, &finished)
}

/// Runs one pair on this host.
pub(crate) fn judge(pair: &Pair) -> Row {
    let (report, runs) = by_hand(pair);
    let finished = move_it(pair, &|Ends { source, destination, .. }| {
        towline(["move", &endpoint(source), &endpoint(destination)]).unwrap().wait(WITHIN).unwrap()
    });
    row(pair, &report, Some(&runs), &finished)
}

/// The row of a pair; `runs` is the outcome of QEMU's own migration, if there was one.
fn row(
    pair: &Pair,
    report: &Value,
    runs: Option<&Result<(), String>>,
    finished: &Result<Moved, String>,
) -> Row {
    let verdict = |key: &str| report[key].as_str().unwrap_or("none").to_owned();
    let mut wrong = Vec::new();
    let is_yes = |verdict: &str| verdict.starts_with("yes");
    let (by_hand, towline) = (verdict("by-hand"), verdict("verdict"));
    let verdict_of = |verdict: &str| match verdict {
        verdict if is_yes(verdict) => Some(true),
        "no" => Some(false),
        _ => None,
    };
    if let Some(runs) = runs {
        if verdict_of(&by_hand) != Some(runs.is_ok()) {
            wrong.push(format!("by hand it says {by_hand:?}, stock QEMU: {runs:?}"));
        }
        if pair.runs != runs.is_ok() {
            wrong.push(format!("it was to run on: {}, stock QEMU: {runs:?}", pair.runs));
        }
    }
    let moved = match finished {
        Ok(done) => {
            if verdict_of(&towline) != Some(*done == Moved::Done) {
                wrong.push(format!("towline says {towline:?}, its move: {done:?}"));
            }
            if *done == Moved::Done { "moved" } else { "refused, runs on" }
        }
        Err(text) => {
            wrong.push(format!("move: {text}"));
            "lost"
        }
    };
    let wrong = (!wrong.is_empty()).then(|| format!("{}: {}; {}", pair.name, wrong.join("; "), report));
    let stock = match runs {
        None => "–",
        Some(Ok(())) => "runs on",
        Some(Err(why)) if why.contains("dead") => "does not (dies)",
        Some(Err(_)) => "does not",
    };
    Row { name: pair.name.into(), by_hand, stock: stock.into(), verdict: towline, moved: moved.into(), wrong }
}

/// Starts both QEMUs, the source's guest counting.
fn start(pair: &Pair) -> Ends {
    let network = pair.taps.then(|| Network::new().unwrap());
    let within = |builder: towline_lab::Builder| match &network {
        Some(network) => builder.within(network),
        None => builder,
    };
    let third = pair.third.clone().map(|builder| builder.start().unwrap());
    let source = within(pair.source.clone()).start().unwrap();
    source.wait_counting(WITHIN).unwrap();
    let destination = within(pair.destination.clone()).incoming_defer().start().unwrap();
    for (qemu, settings) in [(&source, &pair.source_settings), (&destination, &pair.destination_settings)] {
        set(qemu, settings);
    }
    Ends { source, destination, _third: third, _network: network }
}

/// Sets capabilities (`+name`, `-name`) and parameters (`name=value`).
fn set(qemu: &Qemu, settings: &[&str]) {
    for setting in settings {
        let (command, arguments) = match setting.split_once('=') {
            Some((name, value)) => {
                let value = value.parse::<u64>().map_or_else(|_| json!(value), |number| json!(number));
                let mut arguments = serde_json::Map::new();
                arguments.insert(name.into(), value);
                ("migrate-set-parameters", Value::Object(arguments))
            }
            None => {
                let state = setting.starts_with('+');
                let capability = json!({ "capability": setting[1..], "state": state });
                ("migrate-set-capabilities", json!({ "capabilities": [capability] }))
            }
        };
        qemu.qmp().execute(command, arguments).unwrap();
    }
}

/// Verdict of `check`, and the outcome of QEMU's own migration.
fn by_hand(pair: &Pair) -> (Value, Result<(), String>) {
    let ends = start(pair);
    let report = check(&ends.source, &ends.destination);
    let mut counter = None;
    let runs = migrate(&ends.source, &ends.destination, |destination| {
        let Ok(now) = destination.counter() else { return Ok(false) };
        Ok(counter.replace(now).is_some_and(|before| now > before))
    });
    (report, runs)
}

/// Runs `towline check`, whose exit status must match its report.
pub(crate) fn check(source: &Qemu, destination: &Qemu) -> Value {
    let checked = towline(["check", "--json", &endpoint(source), &endpoint(destination)]);
    report(checked.unwrap().wait(WITHIN).unwrap())
}

fn report(checked: Finished) -> Value {
    let Finished { stdout, stderr, status } = checked;
    let report = stdout.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).next_back();
    let report = report.unwrap_or_else(|| panic!("{status}: {stdout}{stderr}"));
    assert_eq!(report["exit"].as_i64(), status.code().map(i64::from), "{report}");
    report
}

/// Has QEMU migrate, and waits until the guest runs on at its destination; the error is the reason why it
/// does not.
pub(crate) fn migrate(
    source: &Qemu,
    destination: &Qemu,
    mut counts_on: impl FnMut(&Qemu) -> Result<bool, String>,
) -> Result<(), String> {
    let uri = format!("unix:{}", destination.directory().join("stream").display());
    let told = destination.qmp().execute("migrate-incoming", json!({ "uri": uri }));
    told.map_err(|error| format!("migrate-incoming: {error:#}"))?;
    source.qmp().execute("migrate", json!({ "uri": uri })).map_err(|error| format!("migrate: {error:#}"))?;
    let begun = Instant::now();
    loop {
        let info =
            source.qmp().execute("query-migrate", Value::Null).map_err(|error| format!("{error:#}"))?;
        if let Some(status) = destination.exited().unwrap() {
            return Err(format!("the destination is dead ({status}): {}", destination.stderr().trim()));
        }
        if info["status"] == "failed" {
            // The source sees the connection end before the destination's process has exited.
            let dead = destination
                .wait_exit(EXIT_WITHIN)
                .map(|status| format!("the destination is dead ({status}), "));
            let there = destination.stderr();
            return Err(format!(
                "{}the source failed: {info}; there: {}",
                dead.unwrap_or_default(),
                there.trim()
            ));
        }
        // Fails if the destination has exited, which the next iteration finds.
        if destination.qmp().status().is_ok_and(|status| status == "running") && counts_on(destination)? {
            return Ok(());
        }
        let patience = if info["status"] == "completed" { WITHIN } else { OUTCOME_WITHIN };
        if begun.elapsed() >= patience {
            return Err(format!("it does not run; the source says {}", info["status"]));
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Returns whether towline moved the guest; an error if the guest is lost, or not where towline reports it.
fn move_it(pair: &Pair, run: &dyn Fn(&Ends) -> Finished) -> Result<Moved, String> {
    let ends = start(pair);
    let Ends { source, destination, .. } = &ends;
    let Finished { status, stderr, .. } = run(&ends);
    let runs = |qemu: &Qemu| {
        let running =
            wait_until("guest that runs", WITHIN, || Ok((qemu.qmp().status()? == "running").then_some(())));
        running.and_then(|()| qemu.wait_counting(WITHIN)).map_err(|error| format!("{error:#}: {stderr}"))
    };
    match status.code() {
        Some(0) => {
            runs(destination)?;
            destination.qmp().execute("stop", Value::Null).map_err(|error| format!("{error:#}"))?;
            destination.check_filled().map_err(|error| format!("{error:#}"))?;
            source.wait_exit(WITHIN).map_err(|error| format!("the source: {error:#}"))?;
            Ok(Moved::Done)
        }
        Some(1) => {
            runs(source)?;
            if destination.exited().unwrap().is_some() || destination.qmp().status().unwrap() != "running" {
                Ok(Moved::Refused(stderr))
            } else {
                Err(format!("two guests run: {stderr}"))
            }
        }
        _ => Err(format!("{status}: {stderr}")),
    }
}
