//! Methods of sending a lane's packets, those that docs/adr chose and those that it rejected.
//!
//! ```text
//! cargo run --release -p towline-bench --example sends -- [RUNS [MIB]]
//!
//!   memfd, mapped and touched ── one method ──► TCP on the loopback ──► a thread that reads into a warm buffer
//! ```
//! A packet is a header of 1344 bytes and 512 KiB of pages. Each run has its own connection, and ends when the
//! reader has acknowledged everything and the kernel no longer reads the memory. Contenders take turns, and ratios are taken
//! round by round.
//!
//! Limits: on the loopback the kernel copies `MSG_ZEROCOPY` and `SEND_ZC` sends, but not those of `sendfile`.

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

use lane::{HEADER_BYTES, Lane, Memory, Method, PACKET_BYTES};

const RUNS_DEFAULT: usize = 7;
const MIB_DEFAULT: usize = 1024;

/// Settings of a run besides its method.
#[derive(Debug, Clone, Copy, Default)]
struct Setting {
    /// `SO_SNDBUF` and `SO_RCVBUF` in bytes; 0: the kernel's automatic sizes.
    send_buffer: usize,
    receive_buffer: usize,
    /// CPUs of both threads.
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
        let (_, _, method, setting) = entries[index];
        run(&memory, method, setting)
    })?;
    print!("{}", table(&contenders, &outcomes, mib));
    Ok(())
}

/// Returns group, label, method and setting of each contender; the first of a group is its base.
fn entries() -> Vec<(&'static str, &'static str, Method, Setting)> {
    let plain = Setting::default();
    let buffers = |send_buffer, receive_buffer| Setting { send_buffer, receive_buffer, ..plain };
    let pinned = |cpus| Setting { pinned: Some(cpus), ..plain };
    let methods = "methods";
    vec![
        (methods, "vectored: header and one buffer", Method::Vectored { buffers: 1 }, plain),
        (methods, "vectored: header and 128 pages", Method::Vectored { buffers: 128 }, plain),
        (methods, "header in its own call", Method::TwoCalls { more: false }, plain),
        (methods, "header in its own call, MSG_MORE", Method::TwoCalls { more: true }, plain),
        (methods, "copied into 32 KiB, written", Method::Linear, plain),
        (methods, "one page per call", Method::PageByPage, plain),
        (methods, "MSG_ZEROCOPY, one buffer", Method::ZeroCopy { buffers: 1, more: true }, plain),
        (methods, "MSG_ZEROCOPY, 128 pages", Method::ZeroCopy { buffers: 128, more: true }, plain),
        (methods, "MSG_ZEROCOPY, without MSG_MORE", Method::ZeroCopy { buffers: 1, more: false }, plain),
        (methods, "sendfile", Method::SendFile, plain),
        (methods, "splice through a pipe", Method::Splice, plain),
        (methods, "io_uring SEND_ZC, registered", Method::Uring { registered: true }, plain),
        (methods, "io_uring SEND_ZC", Method::Uring { registered: false }, plain),
        ("buffers", "vectored, as it is", Method::Vectored { buffers: 1 }, plain),
        ("buffers", "vectored, SO_SNDBUF 256 KiB", Method::Vectored { buffers: 1 }, buffers(256 << 10, 0)),
        ("buffers", "vectored, SO_SNDBUF 4 MiB", Method::Vectored { buffers: 1 }, buffers(4 << 20, 0)),
        ("buffers", "vectored, SO_RCVBUF 4 MiB", Method::Vectored { buffers: 1 }, buffers(0, 4 << 20)),
        ("buffers", "vectored, both 4 MiB", Method::Vectored { buffers: 1 }, buffers(4 << 20, 4 << 20)),
        ("threads", "vectored, anywhere", Method::Vectored { buffers: 1 }, plain),
        ("threads", "vectored, each on its own CPU", Method::Vectored { buffers: 1 }, pinned([0, 1])),
        ("threads", "vectored, both on one CPU", Method::Vectored { buffers: 1 }, pinned([0, 0])),
    ]
}

fn run(memory: &Memory, method: Method, setting: Setting) -> Result<Figures> {
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
            let mut replies = near.try_clone()?;
            let mut lane = Lane::new(near, memory, method)?;
            let (begun, cpu) = (Instant::now(), cpu_time());
            for packet in 0..packets {
                lane.send(packet * PACKET_BYTES)?;
            }
            lane.finish()?;
            let cpu = cpu_time() - cpu;
            replies.read_exact(&mut [0])?;
            Ok((begun.elapsed().as_secs_f64(), cpu.as_secs_f64()))
        });
        let (seconds, sender_cpu) = sender.join().expect("no panic")?;
        let receiver_cpu = receiver.join().expect("no panic")?.as_secs_f64();
        Ok(Figures { seconds, sender_cpu, receiver_cpu })
    })
}

/// Reads `total` bytes, and acknowledges them. Returns the CPU time.
fn receive(mut stream: TcpStream, total: usize, cpu: Option<usize>) -> Result<Duration> {
    pin(cpu)?;
    let mut buffer = vec![1; PACKET_BYTES];
    let mut left = total;
    let begun = cpu_time();
    while left > 0 {
        let length = left.min(buffer.len());
        let received = stream.read(&mut buffer[..length])?;
        ensure!(received > 0, "the sender closed the connection with {left} bytes missing");
        left -= received;
    }
    stream.write_all(&[0])?;
    Ok(cpu_time() - begun)
}

fn pin(cpu: Option<usize>) -> Result<()> {
    let Some(cpu) = cpu else { return Ok(()) };
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).with_context(|| format!("pinning to CPU {cpu}"))
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
        columns: vec!["method", "GB/s", "sender CPU ms/GB", "receiver CPU ms/GB", "sender CPU, × the first"],
        rows: rows.collect(),
        notes: Vec::new(),
    }
}
