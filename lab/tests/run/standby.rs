//! `towline standby`: a recorded guest whose host is off runs on, from its newest image, and once.

use std::fs;
use std::time::Instant;

use towline_lab::counting::make_ext4;
use towline_lab::{Towline, require_lab, wait_until};

use crate::forks::with_disk_of;
use crate::instants::assert_refused;
use crate::record::{RECORD, stored, wait_stored};
use crate::support::{Saved, WITHIN};

/// A takeover whose guest does not run yet.
const BEGUN: &str = r#"{"version":1,"host":"other","pid":1,"at":"2026-01-01T00:00:00Z","id":1,"runs":false}"#;

impl Saved {
    pub(crate) fn standby(&self, name: &str, options: &[&str]) -> Towline {
        let place = self.path(RECORD).display().to_string();
        let binary = self.binary();
        let words = ["standby", &place, "--json", "--name", name, "--trust-command-line", "--qemu", &binary];
        let words: Vec<_> = words.into_iter().chain(options.iter().copied()).map(str::to_owned).collect();
        self.towline(words.into_iter().chain(self.set()))
    }
}

#[test]
fn one_of_two_standbys_runs_the_guest_of_a_dead_host_from_its_newest_image() {
    if !require_lab("one_of_two_standbys_runs_the_guest_of_a_dead_host_from_its_newest_image") {
        return;
    }
    let saved = with_disk_of(make_ext4);
    let mut web = saved.agent("web");
    web.begin_to_count();
    let refused = saved.standby("early", &["--primary-is-dead"]).wait(WITHIN).unwrap();
    assert_refused(&refused, &["No such file"]);
    let mut record = saved.record("web", RECORD, &["--every", "500ms"]);
    wait_stored(&mut record, 3);
    let [asked, fenced] = ["asked", "fenced"].map(|name| saved.path(name).display().to_string());
    // A program that fails is asked again; one that says much, or leaves others, is no different.
    let arbiter = format!(
        "exec:echo >> {asked}; [ -e {fenced} ] && exit 0; [ $(wc -l < {asked}) -gt 3 ] || {{ echo no link >&2; exit 9; }}; \
         sleep 1000 & head -c 200000 /dev/zero >&2; exit 1"
    );
    let options = ["--arbiter", &arbiter, "--every", "100ms"];
    let mut standbys = ["s1", "s2"].map(|name| saved.standby(name, &options));
    let asks = || fs::read_to_string(&asked).unwrap_or_default().lines().count();
    let wait_asked =
        |count| wait_until("the arbiter", WITHIN, || Ok((asks() >= count).then_some(()))).unwrap();
    wait_asked(8);
    saved.kill("web");
    drop(web);
    let record = record.wait(WITHIN).unwrap();
    assert_eq!(record.status.code(), Some(7), "{}", record.stderr);
    // A death is not enough.
    wait_asked(asks() + 8);
    assert_eq!(saved.guests(), [""; 0]);
    standbys.iter_mut().for_each(|standby| standby.check().unwrap());
    // One that cannot run does not keep others from it.
    let failed = saved.standby("s0", &["--primary-is-dead", "--set", "drive.disk0.file=/missing"]);
    assert_refused(&failed.wait(WITHIN).unwrap(), &["/missing"]);
    assert_eq!(fs::read_dir(saved.path(RECORD).join("takeovers")).unwrap().count(), 0);
    fs::write(&fenced, "").unwrap();
    let off = Instant::now();
    let ended = standbys.map(|standby| standby.wait(WITHIN).unwrap());
    let (won, lost): (Vec<_>, Vec<_>) = ended.iter().partition(|ended| ended.status.success());
    assert_eq!((won.len(), lost.len()), (1, 1), "{ended:?}");
    assert_refused(lost[0], &["has taken the guest over"]);
    let newest = stored(&record.stdout).last().unwrap()["sequence"].clone();
    assert!(won[0].stdout.contains(&format!("\"sequence\":{newest}")), "{}", won[0].stdout);
    for ended in &ended {
        assert_eq!(
            ended.stdout.matches("exit status 9: no link; it is asked again").count(),
            1,
            "{}",
            ended.stdout
        );
    }
    let guests = saved.guests();
    assert_eq!(guests.len(), 1, "{guests:?}");
    let mut guest = saved.agent(&guests[0]);
    guest.wait_ticking(WITHIN).unwrap();
    println!("it runs {} ms after its host was said to be off", off.elapsed().as_millis());
    // It is recorded on; a takeover of a guest that runs, which its user has called dead, ends its record.
    let mut record = saved.record(&guests[0], RECORD, &["--every", "500ms"]);
    wait_stored(&mut record, 2);
    assert_refused(
        &saved.standby("s3", &["--primary-is-dead"]).wait(WITHIN).unwrap(),
        &["has taken the guest over"],
    );
    // Of the same name as the first one: a guest's overlays are those of its takeover.
    let wrong = saved.standby("s3", &["--primary-is-dead", "--after", "1"]).wait(WITHIN).unwrap();
    assert!(wrong.status.success(), "{}{}", wrong.stdout, wrong.stderr);
    let finished = record.wait(WITHIN).unwrap();
    assert_eq!(finished.status.code(), Some(3), "{}", finished.stderr);
    assert!(finished.stderr.contains("is the older of two"), "{}", finished.stderr);
    for name in [guests[0].as_str(), "s3"] {
        drop(guest);
        guest = saved.agent(name);
        guest.assert_counted(name);
        saved.quit(name);
    }
}

#[test]
fn a_record_ends_with_its_guest_also_while_another_host_takes_it_over() {
    if !require_lab("a_record_ends_with_its_guest_also_while_another_host_takes_it_over") {
        return;
    }
    let saved = with_disk_of(make_ext4);
    let mut record = saved.record("web", RECORD, &["--every", "500ms"]);
    wait_stored(&mut record, 1);
    let begun = saved.path(RECORD).join("takeovers/1.json");
    fs::create_dir_all(begun.parent().unwrap()).unwrap();
    fs::write(&begun, BEGUN).unwrap();
    let says = || Ok(record.stdout().contains("other takes the guest over").then_some(()));
    wait_until("its notice", WITHIN, says).unwrap();
    saved.kill("web");
    let record = record.wait(WITHIN).unwrap();
    assert_eq!(record.status.code(), Some(7), "{}{}", record.stdout, record.stderr);
}
