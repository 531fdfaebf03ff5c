"""Parameter sets per expensive test in `make test`; `make test-all` runs all.

The kept sets are spread evenly over a test's list, to meet its schedules, heads and temperatures.
0 leaves the test to `make test-all`; other tests find the same faults sooner. A test is listed when
its list takes more than about four seconds on a core.
"""

import pytest

KEPT = {
    "test_acceptance": {
        "test_a_family_passes_its_trial_at_any_size": 5,
    },
    "test_api": {
        "test_the_documented_code_runs": 0,
        "test_an_evaluation_is_compared_with_another": 0,
        "test_a_head_is_trained_in_a_loop_of_ones_own": 1,
    },
    "test_audit": {
        "test_planted_faults_are_found": 3,
    },
    "test_audit_servers": {
        "test_a_tie_hides_nothing_behind_it": 2,
    },
    "test_auto_tree": {
        "test_trials_cost_little_beside_the_best_chain": 1,
    },
    "test_bitwise": {
        "test_text_is_that_of_plain_decoding": 5,
        "test_processes_have_the_text_of_plain_decoding_in_one": 3,
        "test_a_rounded_draft_leaves_a_float32_targets_text": 2,
    },
    "test_block_heads": {
        "test_sampled_text_is_the_targets": 0,
        "test_greedy_text_is_the_targets_and_every_draft_token_is_of_the_newest_block": 3,
        "test_every_kind_of_head_decodes_exactly": 2,
    },
    "test_budget": {
        "test_fewer_rows_enter_where_they_cost_more": 2,
        "test_outputs_are_the_targets_whatever_rows_cost": 3,
    },
    "test_cli": {
        "test_a_training_process_that_has_read_its_data_still_prints_one_line": 0,
        "test_a_language_model_drafts_and_is_evaluated": 0,
    },
    "test_conformance": {
        "test_our_schedules_conform": 4,
    },
    "test_cpu": {
        "test_laid_out_layers_decode_what_transformers_generates": 2,
    },
    "test_device_decode": {
        "test_no_operation_sees_two_devices": 3,
        "test_a_step_launches_and_waits_a_few_times_only": 1,
        "test_keys_are_not_repeated_for_the_heads_that_share_them": 2,
        "test_a_controller_launches_and_waits_a_few_times_only": 1,
        "test_one_graph_chooses_tokens_for_every_temperature_and_seed": 1,
        "test_nothing_is_recorded_while_a_send_waits_for_its_peer": 1,
    },
    "test_device_training": {
        "test_no_operation_of_training_sees_two_devices": 4,
        "test_a_layer_of_a_draft_is_one_graph_to_the_compiler": 0,
    },
    "test_doc_runs": {
        "test_commands_run": 1,
    },
    "test_docs": {
        "test_drafts_of_the_papers_models_are_made_by_the_commands_above_them": 4,
        "test_the_pictures_are_what_the_engine_draws": 0,
    },
    "test_draft_calls": {
        "test_drafts_that_share_a_pass_are_those_of_each_alone": 0,
        "test_drafts_that_mix_are_noticed_and_cost_no_output": 1,
        "test_bitwise_outputs_have_drafts_of_their_own": 0,
    },
    "test_eagle_schedules": {
        "test_greedy_text_equals_transformers_greedy": 3,
        "test_greedy_text_is_the_targets_whatever_the_draft_draft_tokens": 6,
        "test_segments_pruned_to_one_row_and_to_none_change_nothing": 1,
        "test_expansion_depth_stays_within_the_time_of_one_row": 1,
        "test_no_segment_has_more_draft_tokens_than_the_setting_says": 4,
        "test_naive_micro_batches_cost_n_plus_m_minus_1_steps_a_round": 2,
    },
    "test_end_to_end": {
        "test_an_eagle_head_is_trained_and_decoded": 1,
    },
    "test_endpoint": {
        "test_vllms_detailed_answers_count_as_the_same_chains_do_here": 0,
        "test_sampled_answers_of_our_server_are_counted_at_each_temperature": 0,
    },
    "test_engine_llama_cpp": {
        "test_the_speed_is_measured_in_turn": 0,
    },
    "test_engine_parity": {
        "test_faults_of_positions_maps_dtype_and_prompts_are_named": 0,
        "test_faults_of_what_an_engine_reads_are_named": 2,
    },
    "test_eval_entropy": {
        "test_a_certain_target_is_drafted_for_better_and_entries_say_so": 0,
    },
    "test_eval_html": {
        "test_a_real_evaluation_writes_its_page": 0,
        "test_many_runs_stay_below_two_megabytes": 0,
    },
    "test_eval_margin": {
        "test_half_precision_differs_by_ties_alone": 0,
    },
    "test_eval_run": {
        "test_outputs_are_compared_with_plain_decodings": 2,
        "test_bitwise_outputs_are_compared_with_plain_decodings_in_half_precision": 1,
    },
    "test_eval_sequences": {
        "test_counts_and_texts_are_those_of_one_after_the_other": 1,
        "test_a_draft_that_weighs_the_company_counts_otherwise": 0,
    },
    "test_every_config": {
        "test_an_error_ends_with_the_command_that_makes_what_is_missing": 0,
    },
    "test_evolution": {
        "test_every_configuration_makes_a_model_that_loads_as_a_target": 0,
        "test_the_merged_model_computes_what_the_adapters_do": 0,
        "test_a_run_that_was_stopped_ends_as_an_unbroken_one": 0,
        "test_adapters_before_the_last_layer_keep_the_copies_bit_for_bit": 0,
        "test_what_reaches_the_copies_is_named_after_training": 0,
        "test_a_draft_loads_within_the_scope_and_elsewhere_by_exception_alone": 0,
    },
    "test_export": {
        "test_layers_in_another_order_are_sorted_with_the_columns_that_read_them": 4,
    },
    "test_families": {
        "test_a_family_is_decoded_exactly": 2,
        "test_a_family_is_read_packed_and_exported": 2,
        "test_heads_train_on_a_family": 1,
    },
    "test_features": {
        "test_training_from_a_dump_in_fp32_is_online_training_bit_for_bit": 0,
        "test_over_several_epochs_the_losses_are_those_of_online_training": 0,
        "test_processes_share_the_shards_of_a_dump": 0,
        "test_a_dump_killed_at_any_moment_goes_on_to_the_same_folder": 0,
        "test_no_layer_of_the_target_is_loaded": 3,
    },
    "test_features_served": {
        "test_training_from_a_server_is_online_training": 1,
        "test_a_run_that_loses_its_server_saves_and_goes_on_later": 0,
        "test_what_cannot_be_dumped_is_refused_before_the_target_runs": 0,
        "test_a_dump_of_another_target_or_of_other_data_is_refused": 0,
    },
    "test_field_thinking": {
        "test_an_evaluation_is_lossless_and_says_where_the_settings_differ": 1,
    },
    "test_flexspec": {
        "test_greedy_text_equals_transformers_greedy": 1,
        "test_draft_tokens_are_those_of_their_paths_read_from_scratch": 2,
        "test_sampled_text_has_the_targets_distribution": 0,
        "test_both_backends_agree": 1,
    },
    "test_flexspec_training": {
        "test_it_learns_a_handful_of_conversations_by_heart": 1,
    },
    "test_forecast": {
        "test_a_run_logs_its_forecasts": 1,
    },
    "test_gpu_check": {
        "test_every_section_runs_and_every_output_is_right": 0,
    },
    "test_hostile_checkpoints": {
        "test_no_value_in_a_checkpoints_description_is_believed": 1,
    },
    "test_hostile_faults": {
        "test_a_kill_at_any_moment_leaves_the_old_or_the_new": 1,
    },
    "test_hostile_inputs": {
        "test_yaml_that_could_grow_is_refused": 1,
    },
    "test_hostile_kills": {
        "test_an_upload_that_is_killed_leaves_one_of_the_two_heads_whole": 0,
    },
    "test_hub": {
        "test_every_failure_is_one_line": 8,
    },
    "test_hub_cards": {
        "test_the_commands_of_a_card_work_as_printed": 0,
    },
    "test_kernels": {
        "test_a_product_is_the_stored_weights_and_a_row_has_the_same_bits_alone": 20,
    },
    "test_launchers": {
        "test_a_run_with_a_compiler_in_its_settings_is_the_run_without": 0,
    },
    "test_layout": {
        "test_the_wheel_holds_the_package_and_runs_from_another_directory": 0,
    },
    "test_long_runs": {
        "test_a_signal_ends_the_run_after_its_step": 1,
        "test_a_run_whose_disk_is_full_again_and_again_ends_as_one_with_room": 0,
        "test_a_run_killed_at_any_moment_resumes_bit_for_bit": 0,
        "test_a_damaged_checkpoint_is_named_and_the_one_before_is_used": 2,
        "test_a_run_without_a_better_score_ends_and_stays_ended": 1,
    },
    "test_lookup": {
        "test_the_output_is_the_targets_under_every_schedule": 4,
        "test_sampled_output_is_plain_decodings_with_shared_noise": 3,
    },
    "test_lossless": {
        "test_greedy_text_equals_transformers_greedy": 1,
        "test_sampled_text_has_the_targets_distribution": 1,
        "test_greedy_text_is_the_targets_whatever_the_draft_draft_tokens": 1,
        "test_steps_equal_the_closed_form_on_a_bernoulli_draft": 0,
        "test_both_tests_of_sampled_text_catch_the_published_tree_rule": 0,
    },
    "test_meter": {
        "test_text_is_the_targets_whatever_part_is_drafted": 6,
        "test_sampled_text_has_the_targets_law_whatever_part_is_drafted": 0,
        "test_both_tests_of_sampled_text_catch_a_token_changed_with_a_part": 0,
    },
    "test_mtp": {
        "test_greedy_text_is_the_targets": 2,
    },
    "test_new": {
        "test_values_are_those_of_the_shipped_configuration_for_this_size": 0,
        "test_smollm2_gets_its_own_recipe": 0,
    },
    "test_not_finite": {
        "test_every_schedule_stops_at_the_same_token_and_names_the_module": 8,
    },
    "test_overfit": {
        "test_a_head_learns_one_conversation_by_heart": 0,
    },
    "test_packing": {
        "test_positions_restart_in_every_document_and_a_mutant_is_caught": 3,
        "test_losses_sums_and_gradients_of_a_packed_row_are_those_of_its_documents": 4,
        "test_checkpointed_layers_run_twice_and_give_the_same_bits": 6,
        "test_attention_across_documents_is_caught_in_the_draft": 3,
        "test_an_evaluation_of_a_packed_row_sums_over_its_documents": 3,
    },
    "test_paper_tables": {
        "test_a_table_runs_and_says_why_a_row_does_not": 1,
        "test_shares_of_conversations_at_once_make_the_same_table": 0,
        "test_the_command_writes_the_table_and_what_it_rests_on": 1,
        "test_a_fault_in_a_declaration_is_refused": 8,
    },
    "test_parallel": {
        "test_two_processes_train_the_run_of_one": 1,
        "test_two_processes_in_bfloat16_train_the_run_of_one": 0,
        "test_sharded_runs_resume_where_they_were_stopped": 1,
        "test_a_real_launch_sets_what_the_other_runs_are_given": 1,
        "test_a_target_in_parts_is_the_same_target": 1,
        "test_processes_wait_for_one_that_is_longer_than_the_usual_timeout": 0,
        "test_a_group_that_the_processes_cannot_share_goes_on_and_says_so": 0,
        "test_processes_on_two_disks_are_refused_at_once": 0,
    },
    "test_parity": {
        "test_what_is_decoded_is_what_is_trained": 3,
        "test_hidden_states_of_other_layers_are_named": 2,
        "test_files_are_compared_in_every_layout_that_the_draft_has": 3,
    },
    "test_peers": {
        "test_an_imported_head_computes_what_its_files_say": 6,
    },
    "test_pipeinfer": {
        "test_greedy_text_is_the_targets_whatever_the_draft_draft_tokens": 3,
        "test_a_language_model_drafts_in_every_schedule": 2,
        "test_steps_follow_the_closed_form": 1,
        "test_starting_again_at_the_root_costs_steps": 0,
        "test_a_recurrent_language_model_drafts_branches": 0,
        "test_a_wrong_mask_between_branches_is_noticed": 0,
    },
    "test_plan": {
        "test_parameters_bytes_and_flops_are_those_of_the_real_networks": 1,
        "test_a_plan_is_near_the_peaks_of_whole_steps": 0,
    },
    "test_ppsd": {
        "test_greedy_text_equals_transformers_greedy": 2,
        "test_greedy_text_is_the_targets_whatever_the_draft_draft_tokens": 2,
        "test_a_hit_takes_one_step_and_a_miss_n": 1,
        "test_sampled_text_has_the_targets_distribution": 0,
        "test_the_distribution_test_catches_the_published_tree_rule": 0,
        "test_speedup_is_the_papers_closed_form": 2,
        "test_an_eagle_head_runs_under_the_schedule": 1,
    },
    "test_pretrained": {
        "test_every_whole_model_loads": 6,
    },
    "test_process": {
        "test_both_backends_agree_with_an_eagle_head": 1,
        "test_both_backends_agree_with_a_speculation_module": 1,
        "test_both_backends_agree_with_an_early_exit_head": 0,
        "test_both_backends_agree_when_segments_are_pruned_on_their_way": 2,
        "test_ranks_decode_what_one_process_decodes": 1,
        "test_the_text_is_the_same_where_waiting_verdicts_cut_drafting_short": 1,
        "test_a_step_sends_one_message_over_each_link": 5,
    },
    "test_process_ahead": {
        "test_the_first_stage_runs_ahead_with_the_same_text_and_steps": 1,
        "test_a_segment_that_is_abandoned_at_any_layer_leaves_no_trace": 4,
    },
    "test_process_failures": {
        "test_a_lost_stage_ends_every_rank_with_a_line": 1,
        "test_a_rank_cut_off_from_everything_ends_too": 0,
        "test_a_rank_that_was_suspended_goes_on": 0,
        "test_a_silent_link_ends_every_rank_with_a_line": 0,
    },
    "test_recurrent_trees": {
        "test_sampled_text_is_plain_decodings": 2,
        "test_greedy_text_is_transformers": 6,
        "test_stages_of_a_cluster_keep_the_states_of_branches": 1,
        "test_trained_drafts_read_the_states_of_branches": 1,
        "test_a_hybrid_decodes_what_transformers_generates": 2,
    },
    "test_reference": {
        "test_the_engine_agrees_with_the_page": 4,
    },
    "test_regenerate": {
        "test_a_stopped_run_says_how_to_go_on": 1,
    },
    "test_retention": {
        "test_every_draft_meets_every_target": 0,
    },
    "test_rotary_lengths": {
        "test_every_schedule_crosses_as_generate_does": 1,
        "test_stage_processes_cross_as_generate_does": 1,
        "test_several_sequences_cross_in_one_pipeline": 2,
    },
    "test_sampling": {
        "test_chains_have_the_targets_law": 1,
        "test_chains_have_the_law_of_the_filtered_target": 0,
        "test_rules_of_whole_rounds_have_the_targets_law": 1,
        "test_rules_of_whole_rounds_have_the_law_of_the_filtered_target": 1,
        "test_plain_decoding_has_the_targets_law": 1,
        "test_the_law_catches_a_mistake_of_the_rejection_rule": 1,
        "test_the_law_catches_a_mistake_of_a_rule_of_whole_rounds": 2,
        "test_the_law_catches_a_mistake_of_plain_draws": 2,
        "test_every_schedule_gives_plain_decodings_text": 6,
        "test_a_rejected_draft_token_that_is_drawn_again_ends_the_round": 10,
    },
    "test_self_prompt": {
        "test_rows_are_conversations_filtered_and_the_same_when_a_run_is_repeated": 0,
    },
    "test_serve_command": {
        "test_ranks_answer_together_and_end_it_at_a_signal": 0,
    },
    "test_serve_http": {
        "test_an_answer_is_what_the_engine_decodes_alone_with_its_figures": 1,
        "test_a_stream_has_the_same_text_and_says_who_made_each_token": 1,
    },
    "test_several": {
        "test_sequences_on_a_rounded_target_decode_what_each_does_alone": 1,
        "test_sequences_that_mix_are_noticed": 1,
        "test_sequences_that_come_and_go_decode_what_each_does_alone": 1,
        "test_a_sequence_that_fails_ends_alone": 2,
        "test_a_sequence_takes_the_steps_that_it_takes_alone": 0,
        "test_as_many_sequences_draft_as_pay": 0,
    },
    "test_several_ranks": {
        "test_ranks_make_the_steps_that_one_process_makes": 0,
        "test_a_sequence_that_fails_ends_alone": 1,
    },
    "test_shipped_heads": {
        "test_a_head_accepts_as_much_as_it_did": 1,
        "test_the_floor_finds_perturbed_weights": 0,
    },
    "test_spd": {
        "test_training_logits_equal_decoding_logits_at_every_occupancy": 4,
        "test_output_and_gradients_equal_a_dense_mask_reference": 10,
    },
    "test_spd_steps": {
        "test_a_module_decodes_the_rows_it_was_trained_on": 1,
        "test_text_is_the_targets_at_every_acceptance": 3,
    },
    "test_spd_timing": {
        "test_a_module_for_output_states_decodes_the_rows_it_was_trained_on": 1,
        "test_rows_in_flight_are_read_one_stage_deeper": 1,
    },
    "test_ssd": {
        "test_the_output_is_the_targets": 8,
    },
    "test_stage_graph": {
        "test_fixed_shapes_equal_recomputing_each_path_from_scratch": 3,
    },
    "test_streaming": {
        "test_a_process_holds_its_part_and_about_a_layer": 0,
        "test_processes_read_parts_that_make_up_the_layers": 1,
        "test_a_part_reads_its_own_tensors_alone_and_is_equal": 3,
    },
    "test_target": {
        "test_random_segments_and_keeps_equal_recomputing_each_path_from_scratch": 4,
        "test_chained_stages_equal_the_models_forward_in_full_and_row_by_row": 8,
    },
    "test_target_files": {
        "test_text_part_of_a_multimodal_checkpoint_is_staged": 1,
    },
    "test_train": {
        "test_spd_learns_a_handful_of_conversations_by_heart": 1,
        "test_a_run_starts_with_the_weights_of_a_trained_draft": 3,
        "test_a_batch_without_counted_rows_has_no_loss_and_a_zero_gradient": 3,
    },
    "test_train_record": {
        "test_a_changed_batch_size_skips_and_repeats_no_row": 2,
    },
    "test_train_screen": {
        "test_decoding_measures_the_head_and_disturbs_nothing": 1,
        "test_decoding_draws_from_no_global_generator": 1,
        "test_best_is_chosen_by_what_is_decoded_where_prompts_are": 2,
    },
    "test_train_throughput": {
        "test_wandb_keeps_a_run_offline": 0,
    },
}


def kept_in(item: pytest.Item) -> dict[str, int]:
    """Return a file's part of the table. Files in folders have a ``KEPT`` of their own."""
    return KEPT.get(item.path.stem) or getattr(item.module, "KEPT", {})  # type: ignore[attr-defined]


def mark_the_rest(items: list[pytest.Item]) -> None:
    """Mark every parameter set beyond the kept ones as `all`."""
    sets: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        name = item.name.split("[")[0]
        if name in kept_in(item) and not item.get_closest_marker("all"):
            sets.setdefault((item.path.stem, name), []).append(item)
    for (_, name), members in sets.items():
        kept = kept_in(members[0])[name]
        chosen = {round(i * (len(members) - 1) / max(kept - 1, 1)) for i in range(kept)}
        for i, item in enumerate(members):
            if i not in chosen:
                item.add_marker(pytest.mark.all)
