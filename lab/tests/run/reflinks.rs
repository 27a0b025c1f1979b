//! Guests with vhost-user devices, whose memory is a reflink of the image, on each filesystem that has them.

use towline_lab::{Filesystem, require_lab, skip};

use crate::network::{EchoClient, GUEST, add_tap, card, card_options, end, guest_address, network, set_up};
use crate::support::{MEMORY_MIB, MIB, Recipe, Saved, WITHIN};

const FILESYSTEM_MIB: u64 = 1024;
/// Memory that the guest writes behind the device's back.
const WRITTEN: u64 = 16 * MIB;

fn a_guest_with_a_card_runs_on_a_reflink(test: &str, kind: &str) {
    if !require_lab(test) {
        return;
    }
    let Some(network) = network(test) else { return };
    let filesystem = match Filesystem::new(kind, FILESYSTEM_MIB) {
        Ok(filesystem) => filesystem,
        Err(error) => return skip(test, &format!("{error:#}")),
    };
    add_tap(&network, 1);
    let place = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
    let socket = place.path().join("net.sock");
    let card = card(&network, &socket, &["--tap", "tap0"]);
    let memory = format!("memory-backend-memfd,id=pc.ram,size={MEMORY_MIB}M,share=on");
    let memory = ["-object", &memory, "-machine", "memory-backend=pc.ram"].map(str::to_owned);
    let arguments = [&memory[..], &card_options(&socket, 1, 4)].concat();
    let line = "ip link set eth0 up";
    let saved = Saved::in_place(place, &Recipe { arguments: &arguments, line, ..Recipe::default() });
    for file in [saved.image(), format!("{}.manifest.json", saved.image())] {
        filesystem.copy(file.as_ref()).unwrap();
    }
    let image = filesystem.path().join("guest.img").display().to_string();
    let chardev = format!("chardev.net0=socket,path={}", socket.display());
    let binary = saved.binary();
    let words = ["run", &image, "--name", "web", "--share", "--json", "--qemu", &binary, "--set", &chardev];
    let words = words.map(str::to_owned).into_iter().chain(saved.set());
    let mut run = saved.towline_within(&filesystem.prefix(), words);
    saved.assert_runs_after(&mut run, "web", "\"memory\":\"reflink\"");
    assert!(run.stdout().contains("memory is mapped from a reflink of "), "{}", run.stdout());
    // Nothing was sent but device state and small blocks.
    let events = towline_lab::expect::events(&run.stdout());
    let completed = events.iter().find(|event| event["event"] == "completed").unwrap();
    assert!(completed["ram"]["transferred"].as_u64().unwrap() <= 2 * MIB, "{completed}");
    let mut guest = saved.agent("web");
    set_up(&mut guest);
    let client = EchoClient::begin(&network, guest_address(GUEST));
    client.wait_blocks(5);
    assert!(client.end() < WITHIN);
    guest.dirty(64 * MIB, WRITTEN).unwrap();
    assert!(guest.stop_dirtying().unwrap() > 0);
    guest.check().unwrap();
    saved.interrupt(run);
    // The guest wrote to its own file, which is gone.
    let verify = ["inspect", "--verify", &image].map(str::to_owned);
    saved.towline_within(&filesystem.prefix(), verify).wait_done(WITHIN).unwrap();
    end(card);
}

#[test]
fn a_guest_with_a_card_runs_on_a_reflink_of_xfs() {
    a_guest_with_a_card_runs_on_a_reflink("a_guest_with_a_card_runs_on_a_reflink_of_xfs", "xfs");
}

#[test]
fn a_guest_with_a_card_runs_on_a_reflink_of_btrfs() {
    a_guest_with_a_card_runs_on_a_reflink("a_guest_with_a_card_runs_on_a_reflink_of_btrfs", "btrfs");
}
