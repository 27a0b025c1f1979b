//! The application inside of the Linux guest: this program. It serves connections of the host to three ports.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read as _, Write as _};

use anyhow::Result;

use super::super::sys::VsockListener;

/// Ports.
pub(super) const ECHO_PORT: u32 = 1024;
pub(super) const RECEIVE_PORT: u32 = 1025;
pub(super) const SEND_PORT: u32 = 1026;
/// Only word of the command line.
pub(super) const OPTION: &str = "--vsock-linux-guest";
/// Printed when all ports are served.
pub(super) const READY: &str = "listening";
const READ_BYTES: usize = 256 << 10;
/// Threads of each port. They exist before they are needed, since their creation would be measured otherwise.
const THREADS: usize = 4;

/// Returns true if this program was started as the application of a guest.
pub fn is_application(words: &[OsString]) -> bool {
    matches!(words, [_, option] if option == OPTION)
}

/// Serves connections until the guest ends.
///
/// # Errors
/// The guest has no vsock device.
pub fn serve() -> Result<()> {
    let services: [(u32, fn(File)); 3] = [(ECHO_PORT, echo), (RECEIVE_PORT, receive), (SEND_PORT, send)];
    let listeners: Vec<_> = services
        .into_iter()
        .map(|(port, service)| Ok((VsockListener::bind(port)?, service)))
        .collect::<Result<_>>()?;
    println!("{READY}");
    std::thread::scope(|scope| {
        let threads: Vec<_> = listeners
            .iter()
            .flat_map(|(listener, service)| {
                (0..THREADS).map(move |_| scope.spawn(move || each(listener, *service)))
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("the thread does not panic"))
    })
}

/// Serves one connection after the other.
fn each(listener: &VsockListener, service: fn(File)) -> Result<()> {
    loop {
        service(listener.accept()?);
    }
}

fn echo(mut stream: File) {
    let mut bytes = vec![0; READ_BYTES];
    while let Ok(read @ 1..) = stream.read(&mut bytes)
        && stream.write_all(&bytes[..read]).is_ok()
    {}
}

fn receive(mut stream: File) {
    let mut bytes = vec![0; READ_BYTES];
    while let Ok(1..) = stream.read(&mut bytes) {}
}

/// Sends messages of the size that the peer requests, until it closes.
fn send(mut stream: File) {
    let mut size = [0; 4];
    if stream.read_exact(&mut size).is_ok() {
        let message = vec![0x5a; u32::from_le_bytes(size) as usize];
        while stream.write_all(&message).is_ok() {}
    }
}
