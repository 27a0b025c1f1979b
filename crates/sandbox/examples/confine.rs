//! Confines itself to reading one directory, then tries to read a file:
//! `cargo run -p towline-sandbox --example confine -- /usr/share /etc/hostname`

use std::error::Error;

use towline_sandbox::{Mode, Policy};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(directory), Some(file)) = (arguments.next(), arguments.next()) else {
        return Err("usage: confine DIRECTORY FILE".into());
    };
    let policy = Policy { read: vec![directory.into()], opens: true, ..Policy::default() };
    policy.confine(Mode::Requested);
    match std::fs::read(&file) {
        Ok(bytes) => println!("{file}: {} bytes", bytes.len()),
        Err(error) => {
            println!("{file}: {error}");
            // Tells a denial of the sandbox from one of the user's own permissions.
            let errno = rustix::io::Errno::from_io_error(&error);
            let denied = errno.and_then(|errno| policy.denied(errno, Some(file.as_ref())));
            println!("denied by the sandbox: {denied:?}");
        }
    }
    Ok(())
}
