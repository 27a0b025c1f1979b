//! Guests with vhost-user devices, whose memory is a reflink of the image on each filesystem that has them,
//! and copied on others.

use towline_lab::{Network, Towline, require_lab, skip, wait_until};

use crate::filesystem::Filesystem;

use crate::network::{EchoClient, GUEST, add_tap, card, card_options, end, guest_address, network, set_up};
use crate::support::{MEMORY_MIB, MIB, Recipe, Saved, WITHIN};

const FILESYSTEM_MIB: u64 = 1024;
/// Memory that the guest writes without the device.
const WRITTEN: u64 = 16 * MIB;

/// A saved guest with a card, and its image on a separate filesystem.
struct SavedWithCard {
    card: Towline,
    saved: Saved,
    image: String,
    chardev: String,
    filesystem: Filesystem,
    network: Network,
}

impl SavedWithCard {
    /// Saves the guest; `None`, with a printed skip, where that is not possible.
    fn new(test: &str, kind: &str) -> Option<Self> {
        if !require_lab(test) {
            return None;
        }
        let network = network(test)?;
        let filesystem = match Filesystem::new(kind, FILESYSTEM_MIB) {
            Ok(filesystem) => filesystem,
            Err(error) => {
                skip(test, &format!("{error:#}"));
                return None;
            }
        };
        add_tap(&network, 1);
        let place = tempfile::Builder::new().prefix("towline-lab-").tempdir().unwrap();
        let socket = place.path().join("net.sock");
        let card = card(&network, &socket, &["--tap", "tap0"]);
        let memory = format!("memory-backend-memfd,id=pc.ram,size={MEMORY_MIB}M,share=on");
        let memory = ["-object", &memory, "-machine", "memory-backend=pc.ram"].map(str::to_owned);
        let arguments = [&memory[..], &card_options(Recipe::default().version, &socket, 1, 4)].concat();
        let line = "ip link set eth0 up";
        let saved = Saved::in_place(place, &Recipe { arguments: &arguments, line, ..Recipe::default() });
        for file in [saved.image(), format!("{}.manifest.json", saved.image())] {
            filesystem.copy(file.as_ref()).unwrap();
        }
        let image = filesystem.path().join("guest.img").display().to_string();
        let chardev = format!("chardev.net0=socket,path={}", socket.display());
        Some(Self { card, saved, image, chardev, filesystem, network })
    }

    /// Starts `towline run` with more options.
    fn run(&self, options: &[&str]) -> Towline {
        let binary = self.saved.binary();
        let words =
            ["run", &self.image, "--name", "web", "--json", "--qemu", &binary, "--set", &self.chardev];
        let words = words.into_iter().chain(options.iter().copied()).map(str::to_owned);
        self.saved.towline_within(&self.filesystem.prefix(), words.chain(self.saved.set()))
    }

    /// The guest runs, and its card and its memory are in order. Then it is ended, and the image is what it
    /// was.
    fn assert_guest_works(self, run: Towline) {
        let mut guest = self.saved.agent("web");
        set_up(&mut guest);
        let client = EchoClient::begin(&self.network, guest_address(GUEST));
        client.wait_blocks(5);
        assert!(client.end() < WITHIN);
        guest.dirty(64 * MIB, WRITTEN).unwrap();
        // The first round is not counted.
        wait_until("pages that are written again", WITHIN, || Ok((guest.dirtied_pages()? > 0).then_some(())))
            .unwrap();
        guest.stop_dirtying().unwrap();
        guest.check().unwrap();
        self.saved.interrupt(run);
        let verify = ["inspect", "--verify", &self.image].map(str::to_owned);
        self.saved.towline_within(&self.filesystem.prefix(), verify).wait_done(WITHIN).unwrap();
        end(self.card);
    }
}

fn a_guest_with_a_card_runs_on_a_reflink(test: &str, kind: &str) {
    let Some(saved) = SavedWithCard::new(test, kind) else { return };
    let mut run = saved.run(&["--share"]);
    saved.saved.assert_runs_after(&mut run, "web", "\"memory\":\"reflink\"");
    assert!(run.stdout().contains("memory is mapped from a reflink of "), "{}", run.stdout());
    // Nothing was sent but device state and small blocks.
    assert!(transferred(&run) <= 2 * MIB, "{}", run.stdout());
    // What the guest writes is in its own file, which is gone with it.
    saved.assert_guest_works(run);
}

fn the_memory_of_a_guest_with_a_card_is_copied(test: &str, kind: &str) {
    let Some(saved) = SavedWithCard::new(test, kind) else { return };
    let refused = saved.run(&["--share"]).wait(WITHIN).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}{}", refused.stdout, refused.stderr);
    let why = "vhost-user devices share the guest's memory, which needs its own file";
    let expected = [why, "leave --share out, and it is copied"];
    assert!(
        expected.iter().all(|text| refused.stdout.contains(text)),
        "{}{}",
        refused.stdout,
        refused.stderr
    );
    let mut run = saved.run(&[]);
    saved.saved.assert_runs_after(&mut run, "web", "\"memory\":\"copied\"");
    let notice = format!("memory is copied, not mapped from the image: {why}");
    assert!(run.stdout().contains(&notice), "{}", run.stdout());
    saved.assert_guest_works(run);
}

/// Bytes of memory that were sent.
fn transferred(run: &Towline) -> u64 {
    let events = towline_lab::expect::events(&run.stdout());
    let completed = events.iter().find(|event| event["event"] == "completed").unwrap();
    completed["ram"]["transferred"].as_u64().unwrap()
}

#[test]
fn a_guest_with_a_card_runs_on_a_reflink_of_xfs() {
    a_guest_with_a_card_runs_on_a_reflink("a_guest_with_a_card_runs_on_a_reflink_of_xfs", "xfs");
}

#[test]
#[ignore = "nightly"]
fn a_guest_with_a_card_runs_on_a_reflink_of_btrfs() {
    a_guest_with_a_card_runs_on_a_reflink("a_guest_with_a_card_runs_on_a_reflink_of_btrfs", "btrfs");
}

#[test]
#[ignore = "nightly"]
fn the_memory_of_a_guest_with_a_card_is_copied_from_ext4() {
    the_memory_of_a_guest_with_a_card_is_copied(
        "the_memory_of_a_guest_with_a_card_is_copied_from_ext4",
        "ext4",
    );
}

#[test]
#[ignore = "nightly"]
fn the_memory_of_a_guest_with_a_card_is_copied_from_tmpfs() {
    the_memory_of_a_guest_with_a_card_is_copied(
        "the_memory_of_a_guest_with_a_card_is_copied_from_tmpfs",
        "tmpfs",
    );
}
