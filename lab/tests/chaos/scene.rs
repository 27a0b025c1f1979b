//! A run: its processes, the fault, and the end.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use towline_lab::expect::{Scratch, Settings, events, qmp, settings};
use towline_lab::{Finished, Flow, Proxy, Qemu, Towline, signal_if_any, towline_binary, wait_until};

use crate::case::{Case, Fault, Kind, Moment, Victim};
use crate::guests::{GuestState, Guests, WITHIN, builder, counting};
use crate::judge::{self, Outcome};
use crate::monitor::MonitorProxy;

/// Longer than any timeout of towline.
const END_WITHIN: Duration = Duration::from_secs(300);
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time after which a listener without a source is ended.
const LISTEN_WITHIN: Duration = Duration::from_secs(20);
/// Maximum downtime in milliseconds.
const DOWNTIME_MS: u64 = 1000;

/// Shell script: mounts a filesystem of this size that only the command and its children see, and runs
/// towline there.
const IN_A_SMALL_FILESYSTEM: &str = r#"mount -t tmpfs -o size=$1 none "$0" && shift && exec "$@""#;

/// Shell script: mounts an empty filesystem at `/proc` that only the command and its children see, and runs
/// towline there.
const WITHOUT_PROC: &str = r#"mount -t tmpfs none /proc && exec "$@""#;

/// Shell script: runs towline with its output redirected into a pipe.
const INTO_A_PIPE: &str = r#"exec "$@" > "$0" 2>&1"#;

struct Fixture {
    scratch: Scratch,
    guests: Guests,
    /// Migration settings of the source before any towline started.
    settings: Option<Settings>,
    /// Proxies in front of the source's monitor and of each destination's.
    monitors: Vec<(Victim, MonitorProxy)>,
    link: Option<Proxy>,
    towlines: Vec<Towline>,
    /// Read end of a towline's output.
    reader: Mutex<Option<File>>,
}

/// Runs a case; returns a summary of the guest's fate, or the fault that was found.
pub(crate) fn play(case: &Case) -> Result<String, String> {
    let mut fixture = Fixture::new(case);
    let pids: Vec<_> = fixture.towlines.iter().map(Towline::pid).collect();
    let outputs = outputs(&fixture.towlines);
    let over = AtomicBool::new(false);
    let Fixture { guests, link, towlines, reader, monitors, .. } = &mut fixture;
    let mut twice = None;
    let begun = Instant::now();
    let operator_ran = std::thread::scope(|scope| {
        let fault = scope.spawn(|| {
            wait_moment(case, &outputs, &over);
            if case.fault == Fault::ClosedOutput {
                reader.get_mut().unwrap().take();
            }
            let targets = FaultTargets { guests, link: link.as_ref(), monitors, towlines: &pids };
            targets.inject(case.fault)
        });
        let mut is_ended = false;
        while towlines.iter_mut().any(|towline| towline.runs().unwrap()) && begun.elapsed() < END_WITHIN {
            // A listener waits for its source until its user ends it.
            let may_listen = case.kind.has_link() && begun.elapsed() > LISTEN_WITHIN;
            if !is_ended && may_listen && listens_without_source(towlines) {
                signal_if_any(towlines[0].pid(), Signal::TERM);
                is_ended = true;
            }
            std::thread::sleep(POLL_INTERVAL);
            // Checked twice: a state seen in the middle of a transition is not a finding.
            if twice.is_none() && case.kind != Kind::Clones && guests.live() > 1 && guests.live() > 1 {
                twice = Some("two guests run".to_owned());
            }
        }
        over.store(true, Ordering::Release);
        fault.join().unwrap()
    });
    drop(link.take());
    let ends = fixture.towlines.drain(..).map(|towline| towline.wait(Duration::ZERO));
    let ends = ends.collect::<anyhow::Result<_>>().map_err(|error| format!("it does not end: {error:#}"))?;
    let outcome = fixture.outcome(case, ends)?;
    let finished = fixture.repair(case, &outcome).and_then(|()| fixture.resume(case, &outcome));
    match twice.filter(|_| !operator_ran && !judge::is_outside_guarantee(case, &outcome)) {
        Some(text) => Err(format!("{text}: {outcome:?}")),
        None => finished.and_then(|()| judge::judge(case, &outcome, operator_ran)),
    }
}

impl Fixture {
    fn new(case: &Case) -> Self {
        let scratch = Scratch::new();
        ["work", "tmp"].iter().for_each(|name| std::fs::create_dir(scratch.path(name)).unwrap());
        let source = case.kind.has_source().then(|| counting(case));
        let mut fixture = Self {
            scratch,
            guests: Guests { source, destinations: Vec::new() },
            settings: None,
            monitors: Vec::new(),
            link: None,
            towlines: Vec::new(),
            reader: Mutex::default(),
        };
        if !case.kind.has_source() {
            fixture.store(case);
        }
        let incoming = match case.kind {
            Kind::ToStock => "tcp:127.0.0.1:0",
            _ => "defer",
        };
        for _ in 0..case.kind.destinations() {
            fixture.guests.destinations.push(builder(case).incoming(incoming).start().unwrap());
        }
        // Some of these are set by this test before a stock QEMU migrates.
        let is_driven = case.kind != Kind::FromStock;
        fixture.settings = fixture.guests.source.as_ref().filter(|_| is_driven).map(settings);
        if case.has_proxies {
            fixture.start_proxies();
        }
        fixture.begin(case);
        fixture
    }

    fn start_proxies(&mut self) {
        let destinations = self.guests.destinations.iter().enumerate();
        let destinations = destinations.map(|(at, qemu)| (Victim::Destination(at), qemu));
        let source = self.guests.source.as_ref().map(|qemu| (Victim::Source, qemu));
        for (index, (victim, qemu)) in source.into_iter().chain(destinations).enumerate() {
            let path = self.scratch.path(&format!("{index}.qmp"));
            self.monitors.push((victim, MonitorProxy::start(qemu, path)));
        }
    }

    /// Endpoint by which towline reaches a QEMU.
    fn endpoint(&self, victim: Victim, qemu: &Qemu) -> String {
        let proxy = self.monitors.iter().find(|(of, _)| *of == victim);
        proxy.map_or_else(|| qmp(qemu), |(_, proxy)| proxy.endpoint())
    }

    /// Stores a guest of this case in an image.
    fn store(&mut self, case: &Case) {
        let source = counting(case);
        let towline = self.towline(&format!("copy {} {}", qmp(&source), self.image()));
        towline.wait_done(WITHIN).unwrap();
    }

    fn image(&self) -> String {
        self.scratch.text("work/guest.img")
    }

    /// Starts the towlines and the processes that they need.
    fn begin(&mut self, case: &Case) {
        let Case { lanes, rate_mib, .. } = case;
        let options = format!("--json --multifd-channels {lanes}");
        let slow = format!("{options} --max-bandwidth {rate_mib}M --downtime-limit {DOWNTIME_MS}");
        let source = self.guests.source.as_ref();
        let source = source.map(|qemu| self.endpoint(Victim::Source, qemu)).unwrap_or_default();
        let to = self.guests.destinations.iter().enumerate();
        let to: Vec<_> = to.map(|(at, qemu)| self.endpoint(Victim::Destination(at), qemu)).collect();
        let image = self.image();
        let line = match case.kind {
            Kind::Copy => format!("copy {slow} {source} {}", to[0]),
            Kind::Move => format!("move {slow} {source} {}", to[0]),
            Kind::Save => format!("copy --resume {slow} {source} {image}"),
            Kind::Restore { stream: true } => format!("copy --stream {slow} {image} {}", to[0]),
            Kind::Restore { stream: false } => format!("copy {options} {image} {}", to[0]),
            Kind::Clones => format!("copy {options} {image} {} {}", to[0], to[1]),
            Kind::Towlines => {
                let at = self.listens(&format!("copy {options} tcp:127.0.0.1:0 {}", to[0]));
                format!("move {slow} {source} tcp:{at}")
            }
            Kind::ToStock => {
                let at = self.join(stock_address(&self.guests.destinations[0]));
                format!("move {slow} {source} tcp:{at}")
            }
            Kind::FromStock => {
                let at = self.listens(&format!("copy {options} tcp:127.0.0.1:0 {}", to[0]));
                self.migrate(at, *rate_mib);
                return;
            }
        };
        let towline = match case.fault {
            Fault::FullDisk(kib) => self.in_small_filesystem(kib, &line),
            Fault::UnreadOutput | Fault::ClosedOutput => self.start_on_a_pipe(&line),
            Fault::HiddenProc => self.start(&["unshare", "-m", "sh", "-c", WITHOUT_PROC, "sh"], &line),
            _ => self.towline(&line),
        };
        self.towlines.push(towline);
    }

    /// Starts a towline that listens; returns its address across the link.
    fn listens(&mut self, line: &str) -> SocketAddr {
        let mut towline = self.towline(line);
        let address = towline.listens_at(WITHIN).unwrap();
        self.towlines.push(towline);
        self.join(address.strip_prefix("tcp:").unwrap().parse().unwrap())
    }

    fn join(&mut self, address: SocketAddr) -> SocketAddr {
        let link = Proxy::start(address).unwrap();
        self.link.insert(link).address()
    }

    fn migrate(&self, to: SocketAddr, rate_mib: u64) {
        let qmp = self.guests.source.as_ref().unwrap().qmp();
        let capabilities = json!([{ "capability": "return-path", "state": true }]);
        qmp.execute("migrate-set-capabilities", json!({ "capabilities": capabilities })).unwrap();
        let parameters = json!({ "max-bandwidth": rate_mib << 20, "downtime-limit": DOWNTIME_MS });
        qmp.execute("migrate-set-parameters", parameters).unwrap();
        qmp.execute("migrate", json!({ "uri": format!("tcp:{to}") })).unwrap();
    }

    fn towline(&self, line: &str) -> Towline {
        self.start(&[], line)
    }

    /// Starts towline by another command, which receives its command line as the last arguments.
    fn start(&self, by: &[&str], line: &str) -> Towline {
        let tmp = format!("TMPDIR={}", self.scratch.text("tmp"));
        let binary = towline_binary().unwrap().display().to_string();
        let words = [tmp.as_str()].into_iter().chain(by.iter().copied()).chain([binary.as_str()]);
        Towline::start(Path::new("/usr/bin/env"), words.chain(line.split(' '))).unwrap()
    }

    fn in_small_filesystem(&self, kib: u64, line: &str) -> Towline {
        let (directory, size) = (self.scratch.text("work"), format!("{kib}k"));
        self.start(&["unshare", "-m", "sh", "-c", IN_A_SMALL_FILESYSTEM, &directory, &size], line)
    }

    /// Starts towline with its output redirected into a full pipe.
    fn start_on_a_pipe(&self, line: &str) -> Towline {
        let path = self.scratch.path("tmp/output");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        // Opened for reading and writing, so there is a reader before there is a writer.
        let mut pipe =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        while pipe.write(&[b'x'; 4096]).is_ok() {}
        let reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
        let mut towline = self.start(&["sh", "-c", INTO_A_PIPE, &path.display().to_string()], line);
        // The shell has opened the pipe once it has replaced itself by towline.
        let (file, binary) = (format!("/proc/{}/cmdline", towline.pid()), towline_binary().unwrap());
        wait_until("a towline", WITHIN, || {
            let line = std::fs::read(&file).unwrap_or_default();
            let is_there = line.starts_with(binary.as_os_str().as_encoded_bytes());
            Ok((is_there || !towline.runs()?).then_some(()))
        })
        .unwrap();
        std::fs::remove_file(&path).unwrap();
        *self.reader.lock().unwrap() = Some(reader);
        towline
    }

    /// Collects the state after all towlines have exited.
    fn outcome(&self, case: &Case, ends: Vec<Finished>) -> Result<Outcome, String> {
        let (source, destinations) = self.guests.wait_stable()?;
        let left = |name: &str| {
            let entries = std::fs::read_dir(self.scratch.path(name)).unwrap();
            entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect()
        };
        let (work, tmp): (Vec<String>, Vec<String>) = (left("work"), left("tmp"));
        let image_is_right =
            (case.kind == Kind::Save && work.iter().any(|name| name == "guest.img")).then(|| {
                let finished =
                    self.towline(&format!("inspect --verify {}", self.image())).wait(WITHIN).unwrap();
                finished.status.success()
            });
        Ok(Outcome { ends, source, destinations, work, tmp, image_is_right })
    }

    /// Undecided moves are finished by `resume`, or stay undecided; neither may run a second guest. Their
    /// records are removed then.
    fn resume(&self, case: &Case, outcome: &Outcome) -> Result<(), String> {
        let before = self.guests.live();
        for id in self.undecided() {
            let finished = self.towline(&format!("resume {id}")).wait(WITHIN).unwrap();
            let live = self.guests.live();
            if live > before.max(1) {
                return Err(format!(
                    "`resume` runs a second guest: {}{}, {case:?}, {outcome:?}",
                    finished.stdout, finished.stderr
                ));
            }
            // It may be finished, so there is no record to forget.
            let _ = self.towline(&format!("resume {id} --forget")).wait(WITHIN).unwrap();
        }
        if self.undecided().is_empty() { Ok(()) } else { Err("the record of a move stays".into()) }
    }

    /// IDs of the undecided moves of this run's QEMUs.
    fn undecided(&self) -> BTreeSet<String> {
        let listed = self.towline("moves --json").wait(WITHIN).unwrap();
        let proxies = self.monitors.iter().map(|(_, proxy)| proxy.endpoint());
        let endpoints: Vec<_> = self.guests.all().map(qmp).chain(proxies).collect();
        let is_ours = |end: &Value| {
            end["endpoint"].as_str().is_some_and(|name| endpoints.iter().any(|known| known == name))
        };
        let moves = events(&listed.stdout).into_iter().filter(|event| event["event"] == "move");
        let ours = moves.filter(|event| is_ours(&event["source"]) || is_ours(&event["destination"]));
        ours.map(|event| event["id"].as_str().unwrap().to_owned()).collect()
    }

    /// Settings that a towline has changed are restored when it exits with 0 or 1, and otherwise by `repair`.
    fn repair(&self, case: &Case, outcome: &Outcome) -> Result<(), String> {
        let Some(before) = self.settings.as_ref().filter(|_| outcome.source != Some(GuestState::Gone)) else {
            return Ok(());
        };
        let source = self.guests.source.as_ref().unwrap();
        let is_cut = matches!(case.fault, Fault::CutMonitor(_));
        if is_cut || outcome.ends.iter().any(|end| !matches!(end.status.code(), Some(0 | 1))) {
            let begun = Instant::now();
            let mut finished = self.towline(&format!("repair {}", qmp(source))).wait(WITHIN).unwrap();
            // QEMU may need time to clean up after a failed migration; `repair` reports that, and is run
            // again.
            while !finished.status.success()
                && finished.stdout.contains("has not ended within")
                && begun.elapsed() < WITHIN
            {
                finished = self.towline(&format!("repair {}", qmp(source))).wait(WITHIN).unwrap();
            }
            if !finished.status.success() {
                return Err(format!(
                    "repair: {}: {}{}, {outcome:?}",
                    finished.status, finished.stdout, finished.stderr
                ));
            }
        }
        let after = settings(source);
        let changed: Vec<_> =
            after.iter().filter(|(name, value)| before.get(*name) != Some(*value)).collect();
        if changed.is_empty() {
            Ok(())
        } else {
            Err(format!("the source is left with {changed:?}: {outcome:?}"))
        }
    }
}

/// Returns true if the first towline still listens, as when its link was cut before its source came.
fn listens_without_source(towlines: &mut [Towline]) -> bool {
    let (listener, others) = towlines.split_first_mut().unwrap();
    let is_alone = others.iter_mut().all(|towline| !towline.runs().unwrap());
    let events = events(&listener.stdout());
    let has_begun = events.iter().any(|event| event["phase"] == "transfer");
    let listens = events.iter().any(|event| event["phase"] == "connect");
    is_alone && listens && !has_begun
}

/// Has a stock QEMU listen; returns the address.
fn stock_address(qemu: &Qemu) -> SocketAddr {
    let migration = qemu.qmp().execute("query-migrate", Value::Null).unwrap();
    let port = migration["socket-address"][0]["port"].as_str().unwrap().parse().unwrap();
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

/// Paths of the towlines' events.
fn outputs(towlines: &[Towline]) -> Vec<std::path::PathBuf> {
    towlines.iter().map(Towline::stdout_path).collect()
}

/// Waits for the moment of the fault, or the end of the run.
fn wait_moment(case: &Case, outputs: &[std::path::PathBuf], over: &AtomicBool) {
    let begun = Instant::now();
    let is_over = || over.load(Ordering::Acquire);
    match case.moment {
        Moment::After(time) => {
            while begun.elapsed() < time && !is_over() {
                std::thread::sleep(POLL_INTERVAL);
            }
        }
        Moment::Behind(phase, time) => {
            let message = |path: &std::path::PathBuf| {
                let text = std::fs::read_to_string(path).unwrap_or_default();
                events(&text).iter().any(|event| event["phase"] == phase)
            };
            while !is_over() && !outputs.iter().any(message) {
                std::thread::sleep(POLL_INTERVAL);
            }
            std::thread::sleep(time);
        }
    }
}

/// Processes and links that a fault acts on.
struct FaultTargets<'a> {
    guests: &'a Guests,
    link: Option<&'a Proxy>,
    monitors: &'a [(Victim, MonitorProxy)],
    /// Process IDs.
    towlines: &'a [u32],
}

impl FaultTargets<'_> {
    /// Injects the fault. True if an operator ran a guest that was complete at its destination, which is not
    /// towline's fault.
    fn inject(&self, fault: Fault) -> bool {
        match fault {
            Fault::Nothing
            | Fault::FullDisk(_)
            | Fault::UnreadOutput
            | Fault::ClosedOutput
            | Fault::HiddenProc => {}
            Fault::Kill(victim) => signal_if_any(self.pid(victim), Signal::KILL),
            Fault::Suspend(victim, time) => {
                signal_if_any(self.pid(victim), Signal::STOP);
                std::thread::sleep(time);
                signal_if_any(self.pid(victim), Signal::CONT);
            }
            Fault::Cut => self.link.unwrap().cut(),
            Fault::Delay(time) => self.delay(time),
            Fault::CutMonitor(of) => self.monitor(of).cut(),
            Fault::HoldMonitor(of, time) => {
                self.monitor(of).hold();
                std::thread::sleep(time);
                self.monitor(of).release();
            }
            Fault::Operator(command) => run_at_source(self.guests, command),
            Fault::StopAndCont(time) => {
                run_at_source(self.guests, "stop");
                std::thread::sleep(time);
                run_at_source(self.guests, "cont");
                return operator_resumed_complete_guest(self.guests);
            }
            Fault::Signal(towline, name, again) => {
                let name = if name == "INT" { Signal::INT } else { Signal::TERM };
                signal_if_any(self.towlines[towline], name);
                if let Some(time) = again {
                    std::thread::sleep(time);
                    signal_if_any(self.towlines[towline], name);
                }
            }
        }
        false
    }

    fn pid(&self, victim: Victim) -> u32 {
        match victim {
            Victim::Source => self.guests.source.as_ref().unwrap().pid(),
            Victim::Destination(index) => self.guests.destinations[index].pid(),
            Victim::Towline(index) => self.towlines[index],
        }
    }

    fn monitor(&self, victim: Victim) -> &MonitorProxy {
        let proxy = self.monitors.iter().find(|(of, _)| *of == victim);
        &proxy.unwrap().1
    }

    fn delay(&self, time: Duration) {
        let link = self.link.unwrap();
        [Flow::ToDestination, Flow::ToSource].into_iter().for_each(|flow| link.hold(flow));
        std::thread::sleep(time);
        link.release();
    }
}

/// Runs an operator's command at the source, which may have exited or may refuse it.
fn run_at_source(guests: &Guests, command: &str) {
    let _ = guests.source.as_ref().unwrap().qmp().execute(command, Value::Null);
}

fn operator_resumed_complete_guest(guests: &Guests) -> bool {
    let qmp = guests.source.as_ref().unwrap().qmp();
    let asked = wait_until("an answer", WITHIN, || {
        let (Ok(status), Ok(migration)) = (qmp.status(), qmp.execute("query-migrate", Value::Null)) else {
            return Ok(Some(false));
        };
        Ok(Some(status == "running" && migration["status"] == "completed"))
    });
    asked.unwrap_or(false)
}
