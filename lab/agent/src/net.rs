//! Traffic of the guest through its network card: an echo server and a client of one.

use std::io::{BufReader, Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};

use crate::pattern::next;

/// Size of a read or write, and of the longest datagram.
const PART: usize = 64 << 10;

/// Echoes on this port, by TCP and UDP, IPv4 and IPv6, until the guest ends.
pub(crate) fn echo(port: u16) -> Result<()> {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))?;
    let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port))?;
    thread::Builder::new().name("echo".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            // A peer that disconnects ends only its own connection.
            thread::spawn(move || drop(echo_stream(&stream)));
        }
    })?;
    thread::Builder::new().name("echo-udp".into()).spawn(move || {
        let mut bytes = vec![0; PART];
        loop {
            if let Ok((length, peer)) = socket.recv_from(&mut bytes) {
                let _ = socket.send_to(&bytes[..length], peer);
            }
        }
    })?;
    Ok(())
}

fn echo_stream(mut stream: &TcpStream) -> std::io::Result<u64> {
    stream.set_nodelay(true)?;
    std::io::copy(&mut BufReader::with_capacity(PART, stream), &mut stream)
}

/// Connects to an echo server `times` times, one after the other, sends `bytes` bytes on each connection, and
/// compares the echo.
pub(crate) fn talk(address: &str, bytes: usize, times: u64) -> Result<()> {
    let address: SocketAddr = address.parse().with_context(|| format!("`{address}` is not an address"))?;
    let mut state = Instant::now().elapsed().as_nanos() as u64;
    for time in 0..times {
        let seed = next(&mut state);
        connect_once(address, bytes, seed).with_context(|| format!("connection {time}"))?;
    }
    Ok(())
}

fn connect_once(address: SocketAddr, bytes: usize, seed: u64) -> Result<()> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let mut sender = stream.try_clone()?;
    let sent = thread::spawn(move || {
        let (mut state, mut left) = (seed, bytes);
        while left > 0 {
            let part = part(&mut state, left);
            sender.write_all(&part)?;
            left -= part.len();
        }
        sender.shutdown(std::net::Shutdown::Write)
    });
    let (mut state, mut left) = (seed, bytes);
    let mut found = vec![0; PART];
    while left > 0 {
        let wanted = part(&mut state, left);
        let found = &mut found[..wanted.len()];
        stream.read_exact(found)?;
        ensure!(found == wanted, "{} bytes before the end, something else came back", left);
        left -= wanted.len();
    }
    sent.join().expect("the sender does not panic")?;
    Ok(())
}

/// Returns the next part of a sequence, at most `left` bytes.
fn part(state: &mut u64, left: usize) -> Vec<u8> {
    let words = left.min(PART).div_ceil(8);
    let mut bytes: Vec<u8> = (0..words).flat_map(|_| next(state).to_le_bytes()).collect();
    bytes.truncate(left);
    bytes
}
