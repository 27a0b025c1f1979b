//! Generation ids of clones: `-device vmgenid,guid=…`, by which a guest learns that it was copied.

use crate::command_line::QemuOption;
use crate::record::Recorded;
use crate::settings::{Setting, addressed};

/// Value of `guid` for which QEMU makes a new id.
const NEW_ID: &str = "auto";

impl Recorded {
    /// Settings that give each guest of this command line a new generation id in place of a recorded one.
    /// They precede the user's own, which replace them.
    pub fn new_generation_ids(&self) -> Vec<Setting> {
        let line = self.command_line();
        let options = line.options().iter().zip(line.setting_keys()).enumerate();
        options
            .filter(|(_, (option, _))| is_generation_id(option))
            .map(|(index, (_, address))| (index, format!("{address}.guid")))
            // The key of a device without an id may be the address of another one, which the image's maker
            // calls `guid`.
            .filter(|(index, key)| addressed(line, key) == Some(*index))
            .map(|(_, key)| Setting { key, value: NEW_ID.into() })
            .collect()
    }
}

fn is_generation_id(option: &QemuOption) -> bool {
    let driver = option.property("driver");
    option.name.as_str() == "device" && driver.as_deref() == Some("vmgenid")
}

#[cfg(test)]
mod tests {
    use crate::command_line::CommandLine;
    use crate::host::HostArguments;
    use crate::policy::AllowedCommandLine;

    fn run(words: &str, own: &[&str]) -> AllowedCommandLine {
        let recorded = CommandLine::parse(words.split(' ')).unwrap().record().unwrap();
        let own = own.iter().map(|setting| setting.parse().unwrap());
        let settings = recorded.new_generation_ids().into_iter().chain(own).collect();
        recorded.allow(&HostArguments { settings, ..HostArguments::default() }).unwrap()
    }

    fn words(guest: &AllowedCommandLine) -> String {
        let words = guest.to_arguments();
        words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_recorded_id_is_replaced_unless_the_user_sets_one() {
        let id = "324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87";
        let recorded = format!("-M q35 -device e1000 -device vmgenid,guid={id}");
        let replaced = run(&recorded, &[]);
        assert!(words(&replaced).contains("-device vmgenid,guid=auto"), "{}", words(&replaced));
        let named = run(&format!("-device vmgenid,id=gen0,guid={id}"), &[]);
        assert!(words(&named).contains("vmgenid,id=gen0,guid=auto"), "{}", words(&named));
        let other = id.replace('3', "4");
        let own = run(&format!("-device vmgenid,id=gen0,guid={id}"), &[&format!("device.gen0.guid={other}")]);
        assert!(words(&own).contains(&other), "{}", words(&own));
        // The key of the first is the address of the second, which is not replaced.
        let hostile = run(&format!("-device vmgenid,guid={id} -device e1000,id=guid"), &[]);
        assert!(words(&hostile).contains("-device e1000,id=guid"), "{}", words(&hostile));
        let removed = run(&recorded, &["device.1="]);
        assert!(!words(&removed).contains("vmgenid"), "{}", words(&removed));
    }
}
