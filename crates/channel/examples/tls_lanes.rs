//! Compares the throughput of lanes with TLS and of plain lanes on this machine: pages from memory into
//! memory over loopback TCP.
//!
//! ```text
//! cargo run --release -p towline-channel --example tls_lanes -- DIR [GIB [RUNS]]
//! ```
//! DIR holds certificates (docs/tls.md). Each lane sends packets like multifd's: a header and 128 pages, from
//! memory that is larger than the caches. The third row is rustls' own record layer (unbuffered), for
//! comparison. The fourth is the bare cipher: records of 16 KiB that are sealed by one thread of each lane and
//! opened by the other, in the caches, without sockets. Rows take turns; the table shows median, minimum and
//! maximum of the runs, the CPU time, and the rate as a share of that without TLS and of the cipher's, as
//! medians of the turns.

use aws_lc_rs::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::UnbufferedServerConnection;
use rustls::unbuffered::{ConnectionState, UnbufferedStatus};
use rustls::version::TLS13;
use rustls::{CipherSuite, ClientConfig, RootCertStore, ServerConfig};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use towline_channel::{
    Cancel, Channel, ChannelExt, ConnectOptions, IoBuf, IoBufMut, ListenOptions, Listener, SendFlags,
    TlsClient, TlsServer, connect_with,
};

type Anything<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const HEADER_BYTES: usize = 1344;
const PACKET_BYTES: usize = 128 * 4096;
const MEMORY_BYTES: usize = 64 << 20;
const RECORD_BYTES: usize = 16 << 10;
/// Of the third row.
const BATCH_BYTES: usize = 16 * RECORD_BYTES;
const ROWS: [&str; 4] = ["plain", "tls", "rustls", "cipher"];

fn main() -> Anything<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let directory = Path::new(arguments.first().ok_or("which directory?")?);
    let gib = arguments.get(1).map_or(Ok(2.0), |text| text.parse::<f64>())?;
    let runs = arguments.get(2).map_or(Ok(5), |text| text.parse::<usize>())?;
    println!(
        "{:<8} {:>5}  {:>6} {:>6} {:>6} GB/s  {:>6} CPU-s/GB  {:>5} of plain  {:>5} of cipher",
        "", "lanes", "median", "least", "most", "", "", ""
    );
    for lanes in [1, 2, 4] {
        let mut turns: Vec<[Figure; ROWS.len()]> = Vec::new();
        for _ in 0..runs {
            let mut turn = [Figure::default(); ROWS.len()];
            for (row, figure) in ROWS.iter().zip(&mut turn) {
                *figure = measure(row, directory, lanes, (gib * (1_u64 << 30) as f64) as usize)?;
            }
            turns.push(turn);
        }
        for (index, row) in ROWS.iter().enumerate() {
            let sorted = |value: &dyn Fn(&[Figure; ROWS.len()]) -> f64| {
                let mut values: Vec<f64> = turns.iter().map(value).collect();
                values.sort_by(f64::total_cmp);
                values
            };
            let median = |values: Vec<f64>| values[values.len() / 2];
            let rates = sorted(&|turn| turn[index].rate);
            let (least, most) = (rates[0], rates[rates.len() - 1]);
            let cost = median(sorted(&|turn| turn[index].cost));
            let of_plain = median(sorted(&|turn| turn[index].rate / turn[0].rate));
            let of_cipher = median(sorted(&|turn| turn[index].rate / turn[ROWS.len() - 1].rate));
            println!(
                "{row:<8} {lanes:>5}  {:>6.2} {least:>6.2} {most:>6.2}       {cost:>6.2}           \
                 {of_plain:>5.2}           {of_cipher:>5.2}",
                median(rates)
            );
        }
    }
    Ok(())
}

/// GB/s of all lanes together, and seconds of processor time for each GB.
#[derive(Clone, Copy, Default)]
struct Figure {
    rate: f64,
    cost: f64,
}

fn measure(row: &str, directory: &Path, lanes: usize, bytes: usize) -> Anything<Figure> {
    let packets = bytes / lanes / PACKET_BYTES;
    let pairs: Vec<Pair> = (0..lanes).map(|_| connect(row, directory)).collect::<Anything<_>>()?;
    let memories: Vec<Vec<u8>> = (0..lanes).map(|lane| vec![lane as u8 + 1; MEMORY_BYTES]).collect();
    let (begun, spent) = (Instant::now(), processor_time());
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for ((mut sender, mut receiver), memory) in pairs.into_iter().zip(&memories) {
            threads.push(scope.spawn(move || -> Anything<()> {
                let header = [7; HEADER_BYTES];
                for packet in 0..packets {
                    let start = packet * PACKET_BYTES % MEMORY_BYTES;
                    sender(&header, &memory[start..start + PACKET_BYTES])?;
                }
                Ok(())
            }));
            threads.push(scope.spawn(move || -> Anything<()> {
                let (mut header, mut pages) = ([0; HEADER_BYTES], vec![0; PACKET_BYTES]);
                for _ in 0..packets {
                    receiver(&mut header, &mut pages)?;
                }
                Ok(())
            }));
        }
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    let gigabytes = (packets * PACKET_BYTES * lanes) as f64 / 1e9;
    let seconds = begun.elapsed().as_secs_f64();
    let cost = (processor_time() - spent).as_secs_f64() / gigabytes;
    Ok(Figure { rate: gigabytes / seconds, cost })
}

type Sender = Box<dyn FnMut(&[u8], &[u8]) -> Anything<()> + Send>;
type Receiver = Box<dyn FnMut(&mut [u8], &mut [u8]) -> Anything<()> + Send>;
type Pair = (Sender, Receiver);

fn connect(row: &str, directory: &Path) -> Anything<Pair> {
    match row {
        "rustls" => connect_rustls(directory),
        "cipher" => bare_cipher(),
        row => connect_channels(row == "tls", directory),
    }
}

fn connect_channels(tls: bool, directory: &Path) -> Anything<Pair> {
    let (deadline, cancel) = (Instant::now() + Duration::from_secs(10), Cancel::new()?);
    let server = tls.then(|| TlsServer::load(directory)).transpose()?;
    let client = tls.then(|| TlsClient::load(directory, Some("localhost"))).transpose()?;
    let options = ListenOptions { tls: server, ..Default::default() };
    let listener = Listener::bind_with(&"tcp:127.0.0.1:0".parse()?, &options)?;
    let (near, far) = std::thread::scope(|scope| -> Anything<_> {
        let far = scope.spawn(|| listener.accept(deadline, &cancel));
        let options = ConnectOptions { tls: client, ..Default::default() };
        let near = connect_with(listener.local_address(), deadline, &cancel, &options)?;
        Ok((near, far.join().expect("no panic")?))
    })?;
    let near: Arc<dyn Channel> = Arc::from(near);
    Ok((
        Box::new(move |header, pages| {
            Ok(near.send_all(&[IoBuf::from(header), IoBuf::from(pages)], SendFlags::empty())?)
        }),
        Box::new(move |header, pages| {
            far.recv_exact(&mut [IoBufMut::from(header)])?;
            // As a lane receives into the memory of a guest that does not run.
            Ok(far.recv_exact_unauthenticated(&mut [IoBufMut::from(pages)])?)
        }),
    ))
}

/// Two ends that only seal and open, each its own record. Nothing is sent, so one nonce is enough.
fn bare_cipher() -> Anything<Pair> {
    let key =
        || Ok::<_, aws_lc_rs::error::Unspecified>(LessSafeKey::new(UnboundKey::new(&AES_128_GCM, &[7; 16])?));
    let (sealing, opening) = (key()?, key()?);
    let nonce = || Nonce::assume_unique_for_key([9; 12]);
    let mut sealed = vec![1; RECORD_BYTES];
    let mut record = vec![2; RECORD_BYTES];
    let tag = opening.seal_in_place_separate_tag(nonce(), Aad::empty(), &mut record)?;
    Ok((
        Box::new(move |_, pages| {
            for _ in 0..pages.len() / RECORD_BYTES {
                let tag = sealing.seal_in_place_separate_tag(nonce(), Aad::empty(), &mut sealed)?;
                let _ = std::hint::black_box(tag);
            }
            Ok(())
        }),
        Box::new(move |_, pages| {
            for _ in 0..pages.len() / RECORD_BYTES {
                let room = &mut pages[..RECORD_BYTES];
                opening.open_separate_gather(nonce(), Aad::empty(), &record, tag.as_ref(), room)?;
            }
            Ok(())
        }),
    ))
}

/// The records of rustls' unbuffered connections: pages are copied once into a buffer that its records are made
/// of, and once from the opened records.
fn connect_rustls(directory: &Path) -> Anything<Pair> {
    let (client, server) = rustls_configurations(directory)?;
    let mut sending = UnbufferedClientConnection::new(client, ServerName::try_from("localhost")?)?;
    let mut receiving = UnbufferedServerConnection::new(server)?;
    let (mut to_client, mut to_server) = (Vec::new(), Vec::new());
    while sending.is_handshaking() || receiving.is_handshaking() {
        let discard = step(sending.process_tls_records(&mut to_client), &mut to_server)?;
        to_client.drain(..discard);
        let discard = step(receiving.process_tls_records(&mut to_server), &mut to_client)?;
        to_server.drain(..discard);
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    let (mut plain, mut sealed) = (vec![0; BATCH_BYTES], vec![0; BATCH_BYTES + 4096]);
    let mut opened = OpenedRecords { room: vec![0; BATCH_BYTES], start: 0, end: 0, content: Vec::new() };
    Ok((
        Box::new(move |header, pages| {
            let mut header = header;
            let mut pages = pages;
            while !header.is_empty() || !pages.is_empty() {
                let first = header.read(&mut plain)?;
                let length = first + pages.read(&mut plain[first..])?;
                let status = sending.process_tls_records(&mut []);
                let ConnectionState::WriteTraffic(mut traffic) = status.state? else {
                    return Err("a connection that cannot send".into());
                };
                let length = traffic.encrypt(&plain[..length], &mut sealed)?;
                near.write_all(&sealed[..length])?;
            }
            Ok(())
        }),
        Box::new(move |header, pages| {
            opened.fill(&mut receiving, &mut far, header)?;
            opened.fill(&mut receiving, &mut far, pages)
        }),
    ))
}

/// One step of a handshake; returns the number of received bytes to discard.
fn step<D>(status: UnbufferedStatus<'_, '_, D>, outgoing: &mut Vec<u8>) -> Anything<usize> {
    match status.state? {
        ConnectionState::EncodeTlsData(mut encode) => {
            let mut room = vec![0; 1 << 16];
            let length = encode.encode(&mut room)?;
            outgoing.extend_from_slice(&room[..length]);
        }
        ConnectionState::TransmitTlsData(transmit) => transmit.done(),
        _ => {}
    }
    Ok(status.discard)
}

/// State of a receiver.
struct OpenedRecords {
    room: Vec<u8>,
    start: usize,
    end: usize,
    /// The rest of the last opened record.
    content: Vec<u8>,
}

impl OpenedRecords {
    fn fill(
        &mut self,
        connection: &mut UnbufferedServerConnection,
        socket: &mut TcpStream,
        mut into: &mut [u8],
    ) -> Anything<()> {
        let taken = into.write(&self.content)?;
        self.content.drain(..taken);
        while !into.is_empty() {
            let status = connection.process_tls_records(&mut self.room[self.start..self.end]);
            self.start += status.discard;
            match status.state? {
                ConnectionState::ReadTraffic(mut traffic) => {
                    while let Some(record) = traffic.next_record() {
                        let record = record?;
                        self.start += record.discard;
                        let taken = into.write(record.payload)?;
                        self.content.extend_from_slice(&record.payload[taken..]);
                    }
                }
                _ => {
                    self.room.copy_within(self.start..self.end, 0);
                    (self.start, self.end) = (0, self.end - self.start);
                    match socket.read(&mut self.room[self.end..])? {
                        0 => return Err("the sender has ended".into()),
                        length => self.end += length,
                    }
                }
            }
        }
        Ok(())
    }
}

fn rustls_configurations(directory: &Path) -> Anything<(Arc<ClientConfig>, Arc<ServerConfig>)> {
    // The same cipher as the other row has.
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    provider.cipher_suites.retain(|suite| suite.suite() == CipherSuite::TLS13_AES_128_GCM_SHA256);
    let provider = Arc::new(provider);
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(directory.join("ca-cert.pem"))?)?;
    let chain = vec![CertificateDer::from_pem_file(directory.join("server-cert.pem"))?];
    let key = PrivateKeyDer::from_pem_file(directory.join("server-key.pem"))?;
    let mut server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    // Their receiver never reads: its end would be a reset.
    server.send_tls13_tickets = 0;
    let client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok((Arc::new(client), Arc::new(server)))
}

fn processor_time() -> Duration {
    let usage = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(usage.tv_sec as u64, usage.tv_nsec as u32)
}
