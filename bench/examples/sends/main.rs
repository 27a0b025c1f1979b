//! Ways to send a lane's packets, side by side: what docs/adr has decided on, and what it has not.
//!
//! ```text
//! cargo run --release -p towline-bench --example sends -- [RUNS [MIB]]
//!
//!   memfd, mapped and touched ── one way ──► TCP on the loopback ──► a thread that reads into a warm buffer
//! ```
//! A packet is a header of 1344 bytes and 512 KiB of pages. Each run has a connection of its own; its clock ends when the
//! reader has said that it has all, and the kernel that it reads none of the memory any more. Contenders take turns, and
//! ratios are taken round by round.
//!
//! Limits: on the loopback the kernel copies what is sent with `MSG_ZEROCOPY` or `SEND_ZC`, but not what `sendfile` sends.

mod lane;
mod sys;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use towline_bench::rounds::{self, Contender, Outcome};
use towline_bench::stats::Summary;
use towline_bench::table::{Content, Row, Table};
use towline_channel::Cancel;

use lane::{HEADER_BYTES, Lane, Memory, PACKET_BYTES, Way};

const RUNS_DEFAULT: usize = 7;
const MIB_DEFAULT: usize = 1024;

/// How a run goes, beside the way.
#[derive(Debug, Clone, Copy, Default)]
struct Setting {
    /// `SO_SNDBUF` and `SO_RCVBUF` in bytes; 0: as the kernel has them, which it adapts.
    send_buffer: usize,
    receive_buffer: usize,
    /// Both threads on one CPU, or each on its own.
    pinned: Option<[usize; 2]>,
}

#[derive(Debug)]
struct Figures {
    seconds: f64,
    sender_cpu: f64,
    receiver_cpu: f64,
}

fn main() -> Result<()> {
    let number = |at, default| std::env::args().nth(at).map_or(Ok(default), |word| word.parse());
    let (runs, mib) = (number(1, RUNS_DEFAULT)?, number(2, MIB_DEFAULT)?);
    ensure!(runs > 0 && mib > 0, "sends [RUNS [MIB]], both more than 0");
    let memory = Memory::new(mib << 20)?;
    let entries = entries();
    let contenders: Vec<Contender> = entries
        .iter()
        .map(|(group, label, ..)| Contender { group: (*group).into(), label: (*label).into() })
        .collect();
    let outcomes = rounds::run(&contenders, runs, &Cancel::new()?, |index| {
        let (_, _, way, setting) = entries[index];
        run(&memory, way, setting)
    })?;
    print!("{}", table(&contenders, &outcomes, mib));
    Ok(())
}

/// Group, label, way, setting. The first is what the others are held against.
fn entries() -> Vec<(&'static str, &'static str, Way, Setting)> {
    let plain = Setting::default();
    let buffers = |send_buffer, receive_buffer| Setting { send_buffer, receive_buffer, ..plain };
    let pinned = |cpus| Setting { pinned: Some(cpus), ..plain };
    let ways = "ways";
    vec![
        (ways, "vectored: header and one buffer", Way::Vectored { buffers: 1 }, plain),
        (ways, "vectored: header and 128 pages", Way::Vectored { buffers: 128 }, plain),
        (ways, "header in its own call", Way::TwoCalls { more: false }, plain),
        (ways, "header in its own call, MSG_MORE", Way::TwoCalls { more: true }, plain),
        (ways, "copied into 32 KiB, written", Way::Linear, plain),
        (ways, "a page a call", Way::PageByPage, plain),
        (ways, "MSG_ZEROCOPY, one buffer", Way::ZeroCopy { buffers: 1, more: true }, plain),
        (ways, "MSG_ZEROCOPY, 128 pages", Way::ZeroCopy { buffers: 128, more: true }, plain),
        (ways, "MSG_ZEROCOPY, without MSG_MORE", Way::ZeroCopy { buffers: 1, more: false }, plain),
        (ways, "sendfile", Way::SendFile, plain),
        (ways, "splice through a pipe", Way::Splice, plain),
        (ways, "io_uring SEND_ZC, registered", Way::Uring { registered: true }, plain),
        (ways, "io_uring SEND_ZC", Way::Uring { registered: false }, plain),
        ("buffers", "vectored, as it is", Way::Vectored { buffers: 1 }, plain),
        ("buffers", "vectored, SO_SNDBUF 256 KiB", Way::Vectored { buffers: 1 }, buffers(256 << 10, 0)),
        ("buffers", "vectored, SO_SNDBUF 4 MiB", Way::Vectored { buffers: 1 }, buffers(4 << 20, 0)),
        ("buffers", "vectored, SO_RCVBUF 4 MiB", Way::Vectored { buffers: 1 }, buffers(0, 4 << 20)),
        ("buffers", "vectored, both 4 MiB", Way::Vectored { buffers: 1 }, buffers(4 << 20, 4 << 20)),
        ("threads", "vectored, anywhere", Way::Vectored { buffers: 1 }, plain),
        ("threads", "vectored, each on its own CPU", Way::Vectored { buffers: 1 }, pinned([0, 1])),
        ("threads", "vectored, both on one CPU", Way::Vectored { buffers: 1 }, pinned([0, 0])),
    ]
}

fn run(memory: &Memory, way: Way, setting: Setting) -> Result<Figures> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    if setting.receive_buffer > 0 {
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, setting.receive_buffer)?;
    }
    let near = TcpStream::connect(listener.local_addr()?)?;
    let (far, _) = listener.accept()?;
    if setting.send_buffer > 0 {
        rustix::net::sockopt::set_socket_send_buffer_size(&near, setting.send_buffer)?;
    }
    let packets = memory.bytes().len() / PACKET_BYTES;
    let total = packets * (HEADER_BYTES + PACKET_BYTES);
    std::thread::scope(|scope| {
        let receiver = scope.spawn(move || receive(far, total, setting.pinned.map(|cpus| cpus[1])));
        let sender = scope.spawn(move || -> Result<(f64, f64)> {
            pin(setting.pinned.map(|cpus| cpus[0]))?;
            let mut answer = near.try_clone()?;
            let mut lane = Lane::new(near, memory, way)?;
            let (begun, cpu) = (Instant::now(), cpu_time());
            for packet in 0..packets {
                lane.send(packet * PACKET_BYTES)?;
            }
            lane.finish()?;
            let cpu = cpu_time() - cpu;
            answer.read_exact(&mut [0])?;
            Ok((begun.elapsed().as_secs_f64(), cpu.as_secs_f64()))
        });
        let (seconds, sender_cpu) = sender.join().expect("no panic")?;
        let receiver_cpu = receiver.join().expect("no panic")?.as_secs_f64();
        Ok(Figures { seconds, sender_cpu, receiver_cpu })
    })
}

/// Reads so many bytes and says that it has them; returns the CPU time that it took.
fn receive(mut stream: TcpStream, total: usize, cpu: Option<usize>) -> Result<Duration> {
    pin(cpu)?;
    let mut buffer = vec![1; PACKET_BYTES];
    let mut left = total;
    let begun = cpu_time();
    while left > 0 {
        let most = left.min(buffer.len());
        let received = stream.read(&mut buffer[..most])?;
        ensure!(received > 0, "the sender has ended with {left} bytes to go");
        left -= received;
    }
    stream.write_all(&[0])?;
    Ok(cpu_time() - begun)
}

fn pin(cpu: Option<usize>) -> Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("no CPU {cpu}"))
}

fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

fn table(contenders: &[Contender], outcomes: &[Outcome<Figures>], mib: usize) -> Table {
    let gigabytes = (mib << 20) as f64 / 1e9;
    let of = |outcome: &Outcome<Figures>, figure: fn(&Figures) -> f64| -> Vec<f64> {
        outcome.values.iter().map(figure).collect()
    };
    let rows = contenders.iter().zip(outcomes).map(|(contender, outcome)| {
        let first = contenders.iter().position(|other| other.group == contender.group).unwrap_or(0);
        let base = of(&outcomes[first], |figures| figures.sender_cpu);
        let rate = Summary::of(outcome.values.iter().map(|figures| gigabytes / figures.seconds));
        let cpu = of(outcome, |figures| figures.sender_cpu);
        let ratio = Summary::of_ratios(&cpu, &base);
        let cost = |values: Vec<f64>| Summary::of(values.iter().map(|seconds| seconds * 1e3 / gigabytes));
        let (sender, receiver) = (cost(cpu), cost(of(outcome, |figures| figures.receiver_cpu)));
        let content = match (&outcome.failure, rate, sender, receiver, ratio) {
            (None, Some(rate), Some(sender), Some(receiver), Some(ratio)) => Content::Measured {
                cells: vec![
                    rate.to_string(),
                    format!("{sender:.0}"),
                    format!("{receiver:.0}"),
                    ratio.to_string(),
                ],
                data: json!({ "gb-per-s": rate.median, "sender-ms-per-gb": sender.median }),
            },
            (failure, ..) => Content::Missing(failure.clone().unwrap_or_default()),
        };
        Row { group: contender.group.clone(), label: contender.label.clone(), content }
    });
    Table {
        name: "sends",
        title: format!("One lane, {mib} MiB over the loopback; median (smallest–largest)"),
        columns: vec!["way", "GB/s", "sender CPU ms/GB", "receiver CPU ms/GB", "sender CPU, of the first"],
        rows: rows.collect(),
        notes: Vec::new(),
    }
}
