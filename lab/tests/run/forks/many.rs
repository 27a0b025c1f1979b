//! Many forks at once, and what else the guest does meanwhile.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use towline_lab::expect::number;
use towline_lab::{Version, require_lab, signal, skip, wait_until};

use super::written;
use crate::filesystem::Filesystem;
use crate::support::{MEMORY_MIB, MIB, Recipe, Saved, WITHIN, ram_pss_in};

/// Memory that the guest writes before it is forked.
const WRITTEN_MIB: u64 = 40;
/// Image that many forks map, since it is smaller than their copies of that.
const IMAGE: &str = "/fork.img";
/// RAM of a fork beside that: pages of its kernel, and what it writes until it is looked at.
const OTHER_MIB: u64 = 8;
/// Port of the guest's echo server.
const PORT: u16 = 7;

/// `cargo xtask soak fork` makes 100. The counter steps ten times a second, as in the tests of many clones.
#[test]
fn many_forks_run_and_share_the_image_of_their_guest() {
    if !require_lab("many_forks_run_and_share_the_image_of_their_guest") {
        return;
    }
    let count = number("TOWLINE_SOAK_FORK_COUNT", 8);
    let interval = Some(Duration::from_millis(100));
    let saved = Saved::of(&Recipe { processors: 1, interval, ..Recipe::default() });
    let settings = [saved.settings(), vec!["accel.tb-size=32".into()]].concat();
    saved.run(&["--name", "web", "--detach"], &settings).wait_done(WITHIN).unwrap();
    let mut web = saved.agent("web");
    let written = web.shell(&written(WRITTEN_MIB), WITHIN).unwrap();
    let begun = Instant::now();
    let mut forks = saved.start_fork("web", &["--name", "fork", "--json", "--count", &count.to_string()]);
    // The guest is taken before the QEMUs of many forks are started.
    wait_until("forks that start", WITHIN, || {
        assert!(forks.runs()?, "{}{}", forks.stdout(), forks.stderr());
        Ok(forks.stdout().contains(r#""event":"starting""#).then_some(()))
    })
    .unwrap();
    let since = web.tick().unwrap();
    let pids = wait_until("forks that run", WITHIN * 5, || {
        assert!(forks.runs()?, "{}{}", forks.stdout(), forks.stderr());
        let events = forks.stdout();
        let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let running = events.filter(|event| event["event"] == "running");
        let pids: Vec<_> = running.filter_map(|event| event["pid"].as_u64()).collect();
        Ok((pids.len() as u64 == count).then_some(pids))
    })
    .unwrap();
    let ran = begun.elapsed();
    pids.iter().for_each(|&pid| saved.wait_tick(pid, IMAGE, since));
    let ticked = begun.elapsed();
    let together = pids.iter().map(|&pid| ram_pss_in(pid, IMAGE)).sum::<u64>();
    println!(
        "{count} forks of a guest of {MEMORY_MIB} MiB that wrote {WRITTEN_MIB}: all run after {:.2} s, tick after {:.2} s; RAM of each \
         {:.1} MiB",
        ran.as_secs_f64(),
        ticked.as_secs_f64(),
        together as f64 / (count * MIB) as f64
    );
    // A few forks do not distribute what all of them read of the image.
    let most = (count * OTHER_MIB + WRITTEN_MIB) * MIB + saved.filled();
    assert!(together <= most, "{together}, expected at most {most}");
    signal(forks.pid(), Signal::INT);
    forks.wait_done(WITHIN).unwrap();
    assert_eq!(saved.guests(), ["web"]);
    saved.assert_is_saved_guest(&mut web);
    // The image is one of the guest, as any other.
    let image = saved.path("fork.img").display().to_string();
    saved.towline(["inspect", "--verify", &image].map(str::to_owned)).wait_done(WITHIN).unwrap();
    saved.run_image(&image, &["--name", "later", "--detach"]).wait_done(WITHIN).unwrap();
    let hash = saved.agent("later").shell("sha256sum /tmp/written", WITHIN).unwrap();
    assert_eq!(hash, written);
    let grandchild = saved.fork("later", &["--name", "grandchild", "--detach"]);
    assert!(grandchild.status.success(), "{}", grandchild.stderr);
    ["web", "later", "grandchild"].iter().for_each(|name| saved.quit(name));
    saved.assert_intact();
}

/// Their image has what the guest wrote, and shares the rest with the guest's image.
#[test]
#[ignore = "nightly"]
fn many_forks_on_a_filesystem_with_reflinks_store_what_the_guest_wrote() {
    let test = "many_forks_on_a_filesystem_with_reflinks_store_what_the_guest_wrote";
    if !require_lab(test) {
        return;
    }
    let filesystem = match Filesystem::new("xfs", 1024) {
        Ok(filesystem) => filesystem,
        Err(error) => return skip(test, &format!("{error:#}")),
    };
    let saved = Saved::new(Version::V10_0);
    for file in [saved.image(), format!("{}.manifest.json", saved.image())] {
        filesystem.copy(file.as_ref()).unwrap();
    }
    let image = filesystem.path().join("guest.img").display().to_string();
    let start = |words: &[&str]| {
        let words = words.iter().map(|word| (*word).to_owned());
        saved.towline_within(&filesystem.prefix(), words.chain(saved.set()))
    };
    start(&["run", &image, "--name", "web", "--detach"]).wait_done(WITHIN).unwrap();
    let mut web = saved.agent("web");
    let written = web.shell(&written(WRITTEN_MIB), WITHIN).unwrap();
    let before = filesystem.allocated().unwrap();
    let agent =
        format!("chardev.agent=socket,path={}/{{name}}.agent,server=on,wait=off", saved.path("").display());
    let words =
        ["fork", "web", "--name", "fork", "--count", "8", "--detach", "--set", &agent].map(str::to_owned);
    saved.towline_within(&filesystem.prefix(), words).wait_done(WITHIN).unwrap();
    let stored = filesystem.allocated().unwrap() - before;
    println!(
        "{} MiB stored for {WRITTEN_MIB} MiB written, of a guest with {} MiB",
        stored / MIB,
        saved.filled() / MIB
    );
    // A copy of all would have its kernel as well.
    assert!(stored < WRITTEN_MIB * MIB + saved.filled(), "{stored}");
    for n in [0, 7] {
        let mut fork = saved.agent(&format!("fork-{n}"));
        assert_eq!(fork.shell("sha256sum /tmp/written", WITHIN).unwrap(), written);
        saved.assert_is_saved_guest(&mut fork);
    }
    let made = filesystem.path().join("fork.img").display().to_string();
    let verify = ["inspect", "--verify", &made].map(str::to_owned);
    saved.towline_within(&filesystem.prefix(), verify).wait_done(WITHIN).unwrap();
    saved.guests().iter().for_each(|name| saved.quit(name));
    saved.wait_for_guests(&[]);
}

/// A connection that was made before talks on while its guest is forked; the forks' ends are theirs, in no network.
#[test]
fn a_connection_of_the_guest_outlives_its_forks() {
    if !require_lab("a_connection_of_the_guest_outlives_its_forks") {
        return;
    }
    let arguments = ["-netdev", "user,id=net0", "-device", "virtio-net-pci,netdev=net0"].map(str::to_owned);
    let line = "ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0";
    let saved = Saved::of(&Recipe { arguments: &arguments, line, ..Recipe::default() });
    // Free when it was asked for.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let network = format!("netdev.net0=user,id=net0,hostfwd=tcp:127.0.0.1:{port}-10.0.2.15:{PORT}");
    let settings = [saved.settings(), vec![network]].concat();
    saved.run(&["--name", "web", "--detach"], &settings).wait_done(WITHIN).unwrap();
    let mut web = saved.agent("web");
    web.echo(PORT).unwrap();
    let mut connection = TcpStream::connect(("127.0.0.1", port)).unwrap();
    connection.set_read_timeout(Some(WITHIN)).unwrap();
    let mut talk = |n: u64| {
        let sent = n.to_le_bytes();
        connection.write_all(&sent).unwrap();
        let mut echoed = [0; 8];
        connection.read_exact(&mut echoed).unwrap();
        assert_eq!(echoed, sent);
    };
    talk(0);
    for n in 1..=number("TOWLINE_SOAK_FORK_COUNT", 3) {
        let options = ["--name", "fork", "--detach", "--set", "netdev.net0=user,id=net0"];
        let mut fork = saved.start_fork("web", &options);
        while fork.runs().unwrap() {
            talk(n);
        }
        let forked = fork.wait(WITHIN).unwrap();
        assert!(forked.status.success(), "{}", forked.stderr);
        saved.quit("fork");
        talk(n);
        saved.wait_for_guests(&["web"]);
    }
    saved.quit("web");
}
